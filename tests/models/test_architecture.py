"""Configurations are read as given, and what cannot be trained is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import ModelSection
from dilocox.errors import ModelError
from dilocox.models import load_model_config, probe_attention
from tests.support.architectures import ARCHITECTURES, small_config


def _refusal(vocabulary: int | None = 96, **architecture: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model_config(ModelSection(architecture=architecture), vocabulary)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_inline_architecture_takes_the_tokenizers_vocabulary() -> None:
    config = small_config("qwen3")
    assert config.model_type == "qwen3"
    assert config.vocab_size == 96
    assert config.hidden_size == 32
    assert config.use_cache is False
    assert config.pad_token_id is None
    assert small_config("opt").pad_token_id is None
    assert small_config("opt", eos_token_id=5, vocab_size=128).eos_token_id == 5
    assert small_config("opt", vocab_size=128).vocab_size == 128


def test_configuration_of_a_folder(tmp_path: Path) -> None:
    small_config("llama", vocab_size=100).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path))
    config = load_model_config(section, 100)
    assert config.vocab_size == 100
    assert config.use_cache is False
    with pytest.raises(ModelError, match=r"101 tokens.*vocabulary 100.*own tokenizer"):
        load_model_config(section, 101)


def test_token_ids_of_a_folder_count_only_with_its_weights(tmp_path: Path) -> None:
    ids = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    small_config("llama", **ids).save_pretrained(tmp_path)
    whole = load_model_config(ModelSection(path=str(tmp_path)), None)
    assert {key: getattr(whole, key) for key in ids} == ids
    shape = load_model_config(ModelSection(path=str(tmp_path), pretrained=False), None)
    assert {key: getattr(shape, key) for key in ids} == dict.fromkeys(ids)


def test_unknown_names_come_with_the_nearest_valid_one() -> None:
    assert 'did you mean "qwen3"' in _refusal(model_type="qwen33")
    text = _refusal(model_type="llama", hiden_size=64)
    assert "model.architecture.hiden_size" in text
    assert 'did you mean "hidden_size"' in text


def test_known_legacy_keys_and_aliases_are_taken() -> None:
    config = small_config("llama", rope_theta=5000.0)
    assert config.rope_parameters["rope_theta"] == 5000.0


def test_what_is_no_causal_lm_with_a_pipeline_plan_is_refused() -> None:
    assert "no pipeline plan" in _refusal(model_type="gpt2")
    assert "no pipeline plan" in _refusal(model_type="bert")
    assert "not a causal language model" in _refusal(model_type="t5")
    assert "not a causal language model" in _refusal(model_type="vit", vocabulary=None)
    assert "more than a text model" in _refusal(model_type="gemma3", vocabulary=None)


def test_wrong_values_are_refused_with_the_types_own_reason() -> None:
    assert "hidden_size" in _refusal(model_type="llama", hidden_size="large")
    assert "tokenizer has 96" in _refusal(**{**ARCHITECTURES["llama"], "vocab_size": 95})


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    small_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    keys = json.loads(file.read_text())
    keys["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    file.write_text(json.dumps(keys))
    with pytest.raises(ModelError, match="quantised"):
        load_model_config(ModelSection(path=str(tmp_path)), None)


def test_layers_with_attributes_of_their_own_are_refused() -> None:
    assert "layers differ in" in _refusal(model_type="gemma4_text", vocabulary=None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "No such file or directory"),
        ("empty", "No such file or directory"),
        ("file/below", "Not a directory"),
        ("far/below/missing", "No such file or directory"),
    ],
)
def test_a_folder_without_a_configuration_is_told_in_few_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    for place in (str(tmp_path / name), f"./{name}", name if name.count("/") > 1 else f"./{name}"):
        with pytest.raises(ModelError) as caught:
            load_model_config(ModelSection(path=place), None)
        said = f"model.path {place}: no usable configuration there ({reason}); give a folder"
        assert str(caught.value).startswith(said)


def test_a_folder_of_adapters_is_no_model(tmp_path: Path) -> None:
    """As TRL, axolotl and unsloth leave it behind."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds adapters, not a model; merge them into"):
        load_model_config(ModelSection(path=str(tmp_path)), None)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    keys = {"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="no usable configuration"):
        load_model_config(ModelSection(path=str(tmp_path)), None)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable configuration"):
        load_model_config(ModelSection(path=str(tmp_path / "absent")), None)


def test_a_tokenizer_with_a_token_more_than_its_model_has_rows_gets_a_mend_that_applies(
    tmp_path: Path,
) -> None:
    """As fine-tuned models have, by a padding token that was added."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 320}')
    with pytest.raises(ModelError) as caught:
        load_model_config(ModelSection(path=str(tmp_path)), 321)
    text = str(caught.value)
    assert "the tokenizer has 321 tokens, the model's vocabulary 320" in text
    assert "remove the added tokens with ids of 320 or more from its tokenizer.json" in text
    assert "resize_token_embeddings(321)" in text
    assert "vocabulary_size" not in text


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_attention_that_the_type_lacks_is_refused_before_its_ranks_start(
    attention: str,
) -> None:
    architecture = {
        "model_type": "gemma2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    hf = load_model_config(ModelSection(architecture=architecture), 96)
    if attention == "eager":
        probe_attention(hf, attention)
        return
    with pytest.raises(ModelError, match=r'set model\.attention = "eager"'):
        probe_attention(hf, attention)
