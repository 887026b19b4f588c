"""Weights and a tokenizer that does not belong to them, refused before text is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.training.builder import Hooks
from dilocox.training.launch import coordinator_process, local, model_check
from dilocox.training.launch.tokenizer_check import check_tokenizer
from tests.support.process_starts import ARCHITECTURE, config, prepared, refusal

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and token files, shared by the tests of this module."""
    return prepared(tmp_path_factory.mktemp("tokenizer"))


def pretrained(folder: Path, place: Path, vocabulary: int) -> Path:
    """A folder as a hub model has it, without weights: configuration and tokenizer (270 tokens)."""
    from transformers import CONFIG_MAPPING

    keys = {key: value for key, value in ARCHITECTURE.items() if key != "model_type"}
    CONFIG_MAPPING["qwen3"](**keys, vocab_size=vocabulary).save_pretrained(folder)
    for file in (place / "tokens" / "tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def test_pretrained_weights_refuse_a_tokenizer_of_their_own(place: Path, tmp_path: Path) -> None:
    model = {"architecture": None, "path": str(pretrained(tmp_path / "tiny", place, 272))}
    check_tokenizer(config(tmp_path, model=model))
    trained = config(tmp_path, model=model, data={"tokenizer": "train"})
    text = refusal(check_tokenizer, trained)
    assert text.startswith('data.tokenizer "train": the weights of model.path ')
    assert "leave out data.tokenizer" in text
    assert "set model.pretrained = false" in text
    # A plan of what would be refused is no plan.
    assert refusal(ModelOutline.of, trained) == text
    fresh = {**model, "pretrained": False}
    check_tokenizer(config(tmp_path, model=fresh, data={"tokenizer": "train"}))
    # What goes on with a run of its own goes on with that run's tokenizer.
    handed = {**model, "handover": True}
    check_tokenizer(config(tmp_path, model=handed, data={"tokenizer": "train"}))


def test_a_model_that_is_not_there_is_named_by_its_own_key(tmp_path: Path) -> None:
    """Not by data.tokenizer, which nobody has set."""
    model = {"architecture": None, "path": str(tmp_path / "missing")}
    text = refusal(check_tokenizer, config(tmp_path, model=model))
    assert text.startswith(f"model.path {tmp_path / 'missing'}: no such folder; ")
    # With a tokenizer of the run file's own that one is not what is missing.
    own = config(tmp_path, model=model, data={"tokenizer": str(tmp_path / "nowhere")})
    assert "model.path" in refusal(check_tokenizer, own)


def test_a_run_that_would_ruin_its_weights_is_not_begun(place: Path, tmp_path: Path) -> None:
    model = {"architecture": None, "path": str(pretrained(tmp_path / "tiny", place, 272))}
    run = config(tmp_path, model=model, data={"tokenizer": "train"})
    text = refusal(local.train_here, run, Hooks(), resume=False, overwrite=False, debug=False)
    assert "leave out data.tokenizer" in text
    text = refusal(
        coordinator_process.coordinate,
        run,
        run_file=tmp_path / "run.toml",
        overrides=[],
        wait_for=None,
        resume=False,
    )
    assert "leave out data.tokenizer" in text
    assert not run.folder.exists()


def test_the_size_of_a_tokenizer_is_known_before_the_text_is_read(
    place: Path, tmp_path: Path
) -> None:
    small = {"architecture": None, "path": str(pretrained(tmp_path / "small", place, 269))}
    tokens = {"folder": str(tmp_path / "data")}
    text = refusal(model_check.check_model, config(tmp_path, model=small, data=tokens))
    assert "the tokenizer has 270 tokens, the model's vocabulary 269" in text
    large = {"architecture": None, "path": str(pretrained(tmp_path / "large", place, 1000))}
    own = config(tmp_path, model=large, data=tokens)
    model_check.check_model(own)
    check_tokenizer(own)  # embeddings may have rows that no token uses
    other = config(tmp_path, model=large, data={**tokens, "tokenizer": small["path"]})
    text = refusal(check_tokenizer, other)
    assert "has 270 tokens" in text
    assert "vocabulary of 1000" in text
    assert "leave out data.tokenizer" in text
    assert not (tmp_path / "data").exists()


def test_a_plan_takes_the_vocabulary_of_a_tokenizer_that_is_given(
    place: Path, tmp_path: Path
) -> None:
    """As the run will: a type's own default is another model's, of 150,000 tokens or so."""
    given = {"tokenizer": str(place / "tokens" / "tokenizer")}
    outline = ModelOutline.of(config(tmp_path, data=given))
    assert outline.hf_config.vocab_size == 270
    assert outline.whole["model.embed_tokens.weight"][0] == 270
    text = refusal(ModelOutline.of, config(tmp_path, data={"tokenizer": str(tmp_path / "none")}))
    assert text.endswith("; to plan without the tokenizer, set vocab_size in model.architecture")
    known = {"architecture": {**ARCHITECTURE, "vocab_size": 300}}
    away = config(tmp_path, model=known, data={"tokenizer": str(tmp_path / "none")})
    assert ModelOutline.of(away).hf_config.vocab_size == 300


# --- the data ---


def test_a_chat_template_that_is_not_there_is_named_before_text_is_read(tmp_path: Path) -> None:
    data = {"format": "chat", "chat_template": str(tmp_path / "chat.jinja")}
    text = refusal(check_tokenizer, config(tmp_path, data=data))
    assert text.startswith(f"data.chat_template {tmp_path / 'chat.jinja'}: cannot be read (No such")
