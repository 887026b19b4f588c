"""Weights out: stage files become a folder that transformers loads, equal to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dilocox.config.run_config import ModelSection
from dilocox.errors import CheckpointError
from dilocox.models import (
    ModelChunk,
    Published,
    finish_model_folder,
    load_model_config,
    open_weights,
    stage_file_name,
    write_stage_file,
)
from dilocox.models.export import copy_tokenizer
from tests.support.architectures import (
    StateSource,
    cut_model,
    reference_model,
    small_config,
    token_ids,
)


def _whole_tensors(chunk: ModelChunk) -> dict[str, torch.Tensor]:
    state = chunk.state_dict()
    return {full: state[local] for local, full in chunk.full_names().items()}


def _write(folder: Path, config: Any, chunks: list[ModelChunk]) -> None:
    for chunk in chunks:
        name = stage_file_name(chunk.spec.index, chunk.spec.count)
        write_stage_file(folder / name, _whole_tensors(chunk), config)


def _tokenizer(folder: Path, **settings: Any) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<|end|>", "<|unk|>", "a", "b", "c"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", unk_token="<|unk|>", **settings
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3_text", "gpt_neox", "opt", "opt-projected", "qwen3_moe", "phi3"]
)
def test_round_trip_is_equal_to_the_bit(name: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = small_config(name, tie_word_embeddings=tied)
    model = reference_model(config, seed=7)
    source, target = tmp_path / "in", tmp_path / "out"
    model.save_pretrained(source)  # type: ignore[operator]
    path = ModelSection(path=str(source))
    config = load_model_config(path, 96)
    _write(target, config, cut_model(config, 3, open_weights(path, config, 0)))
    finish_model_folder(target, config, _tokenizer(tmp_path / "tokenizer"))

    loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    state = loaded.state_dict()
    assert state.keys() == expected.keys()
    for full, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[full]), full
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, model(input_ids=ids).logits)
    assert loaded.config.use_cache is True
    assert loaded.config.eos_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer("a c b")["input_ids"] == [2, 4, 3]
    out = loaded.generate(ids[:1, :4], max_new_tokens=3, do_sample=False)
    assert out.shape[1] > 4

    # The same names and the same split of tensors as save_pretrained writes.
    assert _stored(target) == _stored(source)
    files = {p.name for p in target.glob("*.safetensors")}
    assert files == {stage_file_name(i, 3) for i in range(3)}
    assert not [p for p in target.iterdir() if p.name.startswith(".")]


def _stored(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            names |= set(opened.keys())
    return names


def test_index_counts_what_is_stored(tmp_path: Path) -> None:
    config = small_config("qwen3", tie_word_embeddings=True)
    model = reference_model(config)
    _write(tmp_path, config, cut_model(config, 2, StateSource(model)))
    finish_model_folder(tmp_path, config, None)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = sum(p.numel() for p in model.parameters())
    assert index["metadata"] == {"total_size": 4 * total, "total_parameters": total}
    assert "lm_head.weight" not in index["weight_map"]
    assert set(index["weight_map"].values()) == {stage_file_name(i, 2) for i in range(2)}
    # Readable by a web server of another user.
    assert {file.stat().st_mode & 0o777 for file in tmp_path.rglob("*.safetensors")} == {0o644}


@pytest.mark.parametrize("names", [("default", "tool_use"), ("rag", "tool_use"), ("default",)])
def test_all_chat_templates_are_published_in_one_folder(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """A record has the digests of plain files alone, so nothing may lie in a subfolder."""
    from transformers import AutoTokenizer

    templates = {name: f"{name}: {{{{ messages[0].content }}}}\n\u00fc" for name in names}
    given: Any = templates if len(names) > 1 else templates["default"]
    tokenizer = _tokenizer(tmp_path / "tokenizer", chat_template=given)
    (tmp_path / "out").mkdir()
    copy_tokenizer(tokenizer, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == given
    assert all(path.is_file() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "chat_template.jinja").exists() == (len(names) == 1)


def test_dtype_of_the_files_is_the_dtype_that_is_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config("qwen3")
    (chunk,) = cut_model(config, 1, StateSource(reference_model(config)))
    tensors = {full: t.bfloat16() for full, t in _whole_tensors(chunk).items()}
    write_stage_file(tmp_path / stage_file_name(0, 1), tensors, config)
    finish_model_folder(tmp_path, config, None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for full, value in loaded.state_dict().items():
        if full in tensors:
            assert torch.equal(value, tensors[full])


def test_generation_settings_of_the_source_are_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    model = reference_model(small_config("llama"))
    model.generation_config.top_k = 7  # type: ignore[union-attr]
    model.generation_config.do_sample = True  # type: ignore[union-attr]
    model.save_pretrained(source)  # type: ignore[operator]
    path = ModelSection(path=str(source))
    config = load_model_config(path, None)
    _write(target, config, cut_model(config, 1, open_weights(path, config, 0)))
    finish_model_folder(target, config, None)
    assert json.loads((target / "generation_config.json").read_text())["top_k"] == 7


def _with_padding(folder: Path) -> Path:
    """The same tokenizer, with all three special tokens."""
    _tokenizer(folder)
    file = folder / "tokenizer_config.json"
    keys = {**json.loads(file.read_text()), "bos_token": "a", "pad_token": "b"}
    file.write_text(json.dumps(keys))
    return folder


def _publish(path: ModelSection, target: Path, tokenizer: Path | None) -> dict[str, Any]:
    """The generation settings of a model that was read from `path` and written to `target`."""
    config = load_model_config(path, None)
    _write(target, config, cut_model(config, 1, open_weights(path, config, 0)))
    finish_model_folder(target, config, tokenizer, path.revision)
    return dict(json.loads((target / "generation_config.json").read_text()))


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token_id": 2, "eos_token_id": 0, "temperature": 0.6, "top_p": 0.9},
        {"eos_token_id": [0, 1], "do_sample": False, "top_k": 3},
    ],
)
def test_settings_that_transformers_would_not_save_are_published(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """They came with the model; that a missing token id is added makes them no worse."""
    from transformers import AutoModelForCausalLM

    source, target = tmp_path / "in", tmp_path / "out"
    reference_model(small_config("llama")).save_pretrained(source)  # type: ignore[operator]
    (source / "generation_config.json").write_text(json.dumps(settings))
    found = _publish(ModelSection(path=str(source)), target, _with_padding(tmp_path / "tokenizer"))
    ids = {"bos_token_id": 2, "eos_token_id": 0, "pad_token_id": 3}
    assert "transformers_version" not in found, "sites publish the same files, whichever wrote them"
    kept = {key: value for key, value in settings.items() if value is not False}
    assert {key: value for key, value in found.items() if value is not False} == {**ids, **kept}
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.generation_config.pad_token_id == 3


def test_settings_that_cannot_be_read_do_not_stop_publishing(tmp_path: Path) -> None:
    source = tmp_path / "in"
    reference_model(small_config("llama")).save_pretrained(source)  # type: ignore[operator]
    for number, text in enumerate(['{"max_new_tokens": -3}', "[1]", "{", '{"top_k": "x"}']):
        (source / "generation_config.json").write_text(text)
        tokenizer = _with_padding(tmp_path / "tokenizer")
        found = _publish(ModelSection(path=str(source)), tmp_path / str(number), tokenizer)
        assert found["pad_token_id"] == 3


def test_of_a_shape_alone_neither_token_ids_nor_settings_are_published(tmp_path: Path) -> None:
    """They are of the source's tokenizer; its padding id would freeze a row of the embedding."""
    source, target = tmp_path / "in", tmp_path / "out"
    ids = {"bos_token_id": 91, "eos_token_id": 92, "pad_token_id": 0}
    small_config("llama", **ids).save_pretrained(source)
    settings = {**ids, "eos_token_id": [92, 93], "do_sample": True, "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(settings))
    shape = ModelSection(path=str(source), pretrained=False)
    found = _publish(shape, target, _with_padding(tmp_path / "tokenizer"))
    own = {"bos_token_id": 2, "eos_token_id": 0, "pad_token_id": 3}
    assert {key: found[key] for key in ids} == own
    assert not found.get("do_sample")
    assert "temperature" not in found
    config = json.loads((target / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (2, 0)
    assert config.get("pad_token_id") is None
    for file in target.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.get_tensor("model.embed_tokens.weight").any(dim=1).all()


def test_generation_settings_of_a_hub_model_are_fetched_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch that was asked for is not `main`, which this cache has not got."""
    import fnmatch
    import shutil

    import huggingface_hub
    from huggingface_hub import constants

    source, commit = tmp_path / "in", "c0ffee" + "0" * 34
    model = reference_model(small_config("llama"))
    model.generation_config.top_k = 7  # type: ignore[union-attr]
    model.generation_config.do_sample = True  # type: ignore[union-attr]
    model.save_pretrained(source)  # type: ignore[operator]
    cache = tmp_path / "hub" / "models--team--tiny"
    snapshot = cache / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "v2").write_text(commit)
    shutil.copyfile(source / "config.json", snapshot / "config.json")

    def download(name: str, revision: str, allow_patterns: list[str], **_: Any) -> str:
        assert (name, revision) == ("team/tiny", "v2")
        for file in source.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copyfile(file, snapshot / file.name)
        return str(snapshot)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = _publish(ModelSection(path="team/tiny", revision="v2"), tmp_path / "out", None)
    assert (found["top_k"], found["do_sample"]) == (7, True)


def test_an_incomplete_folder_is_refused_and_not_loadable(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config("llama", tie_word_embeddings=False)
    first, last = cut_model(config, 2, StateSource(reference_model(config)))
    with pytest.raises(CheckpointError, match="no stage files"):
        finish_model_folder(tmp_path, config, None)
    _write(tmp_path, config, [first])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and \d+ more is in no stage file"):
        finish_model_folder(tmp_path, config, None)
    assert [p.name for p in tmp_path.iterdir()] == [stage_file_name(0, 2)]
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    _write(tmp_path, config, [last])
    finish_model_folder(tmp_path, config, None)
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_doubled_and_foreign_tensors_are_refused(tmp_path: Path) -> None:
    config = small_config("llama", tie_word_embeddings=False)
    chunks = cut_model(config, 2, StateSource(reference_model(config)))
    _write(tmp_path, config, chunks)
    extra = tmp_path / stage_file_name(0, 3)
    write_stage_file(extra, {"model.norm.weight": torch.ones(32)}, config)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in both"):
        finish_model_folder(tmp_path, config, None)
    write_stage_file(extra, {"model.layers.9.foreign": torch.ones(2)}, config)
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.foreign.*does not belong"):
        finish_model_folder(tmp_path, config, None)
    extra.unlink()
    finish_model_folder(tmp_path, config, None)


def test_a_stage_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    config = small_config("llama")
    path = tmp_path / stage_file_name(0, 1)
    write_stage_file(path, {"model.norm.weight": torch.ones(32)}, config)
    before = path.read_bytes()
    blocked = tmp_path / f".{path.name}.part"
    blocked.mkdir()
    with pytest.raises((CheckpointError, OSError)):
        write_stage_file(path, {"model.norm.weight": torch.zeros(32)}, config)
    assert path.read_bytes() == before


# --- in files of a size, and in bf16 ---


def _split(
    folder: Path, name: str, form: Published, stages: int = 2
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose stages are written in `form`; its configuration and what was written."""
    config = small_config(name)
    model = reference_model(config, seed=3)
    chunks = cut_model(config, stages, StateSource(model))
    for chunk in chunks:
        path = folder / stage_file_name(chunk.spec.index, chunk.spec.count)
        write_stage_file(path, _whole_tensors(chunk), config, form)
    return config, {k: v for each in chunks for k, v in _whole_tensors(each).items()}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "phi3", "gpt_neox"])
def test_a_stage_may_have_several_files(name: str, bf16: bool, tmp_path: Path) -> None:
    form = Published(bf16, 14_000)
    config, whole = _split(tmp_path, name, form)
    finish_model_folder(tmp_path, config, None)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 4
    assert [path.name for path in files] == [
        stage_file_name(n, len(files)) for n in range(len(files))
    ]
    for path in files:
        with safe_open(path, framework="pt") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= form.file_bytes or len(sizes) == 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    said = json.loads((tmp_path / "config.json").read_text())["dtype"]
    assert said == ("bfloat16" if bf16 else "float32")
    source = open_weights(ModelSection(path=str(tmp_path)), config, 0)
    for key, tensor in whole.items():
        expected = tensor.to(torch.bfloat16).float() if bf16 else tensor
        assert torch.equal(source.tensor(key), expected), key


def test_a_limit_that_all_fits_changes_nothing(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    for folder, form in ((whole, None), (split, Published(file_bytes=10**6))):
        config = small_config("qwen3")
        chunks = cut_model(config, 2, StateSource(reference_model(config, seed=3)))
        for chunk in chunks:
            path = folder / stage_file_name(chunk.spec.index, chunk.spec.count)
            write_stage_file(path, _whole_tensors(chunk), config, form)
        finish_model_folder(folder, config, None)
    found = [
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (whole, split)
    ]
    assert found[0] == found[1]
    assert stage_file_name(1, 2) in found[0]


def test_a_model_is_published_again_in_the_same_folder(tmp_path: Path) -> None:
    """Whether the first time was finished, or broke off between two names."""
    form = Published(file_bytes=20_000)
    config, whole = _split(tmp_path, "qwen3", form)
    finish_model_folder(tmp_path, config, None)
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / names[3]).unlink()
    _split(tmp_path, "qwen3", form)
    finish_model_folder(tmp_path, config, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    source = open_weights(ModelSection(path=str(tmp_path)), config, 0)
    assert all(torch.equal(source.tensor(key), tensor) for key, tensor in whole.items())


def test_no_more_than_a_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a file are rounded when it is written, not all of them before."""
    import safetensors.torch

    events: list[str] = []
    save, converted = safetensors.torch.save_file, Published.converted

    def saved(*given: Any, **named: Any) -> None:
        events.append("file")
        save(*given, **named)

    def rounded(form: Published, tensor: torch.Tensor) -> torch.Tensor:
        events.append("tensor")
        return converted(form, tensor)

    monkeypatch.setattr(safetensors.torch, "save_file", saved)
    monkeypatch.setattr(Published, "converted", rounded)
    _split(tmp_path, "qwen3", Published(bf16=True, file_bytes=10_000), stages=1)
    assert events.count("file") > 4
    runs = "".join(event[0] for event in events).split("f")
    assert max(map(len, runs)) < events.count("tensor") / 3
