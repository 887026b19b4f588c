"""Weights are there, and whole, before a run or a site begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import ModelError
from dilocox.models import prefetch
from dilocox.models.meta_model import build_skeleton
from dilocox.models.prefetch import fetch_weights
from dilocox.training.builder import Hooks
from dilocox.training.launch import local, preflight

pytestmark = pytest.mark.waits

SHAPE = {
    "vocab_size": 270,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def config(path: Path | str, root: Path, **model: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "run", "folder": str(root / "{name}")},
            "model": {"path": str(path), **model},
            "data": {"source": str(root), "folder": str(root / "tokens"), "sequence_length": 16},
            "site": {"batch_size": 4, "micro_batch_size": 2},
            "outer": {"rounds": 2, "inner_steps": 4},
            "sites": {"paris": {}, "lyon": {}},
        }
    )


def passes(*_: object, **__: object) -> None:
    """Stand for a check that has nothing to say about these weights."""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model in two files with an index."""
    from transformers import CONFIG_MAPPING

    hf_config = CONFIG_MAPPING["qwen3"](**SHAPE)
    folder = tmp_path / "tiny"
    hf_config.save_pretrained(folder)
    names = [name for name, _ in build_skeleton(hf_config).named_parameters()]
    shapes = dict(build_skeleton(hf_config).named_parameters())
    index = {}
    for number, part in enumerate((names[:5], names[5:])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: torch.zeros(shapes[name].shape) for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_whole_weights_pass_and_are_read_in_a_child(whole: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    fetch_weights(config(whole, tmp_path), lambda step, _: steps.append(step))
    assert steps == ["fetching the weights", *["reading the weights' headers"] * 2]


def test_nothing_is_fetched_that_is_not_needed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr("dilocox.utils.processes.call_in_child", refuse)
    fetch_weights(config(whole, tmp_path, pretrained=False))


def cut_off(folder: Path) -> str:
    file = folder / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    return r"model-00002-of-00002\.safetensors: cannot be read .*; fetch the model again"


def another_part(folder: Path) -> str:
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    first.write_bytes(second.read_bytes())
    return r"model-00001-of-00002\.safetensors: lacks model\..*, which the index names"


def missing_part(folder: Path) -> str:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return r"model-00002-of-00002\.safetensors is missing"


def pickled(folder: Path) -> str:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return r"no model\.safetensors .* there; pickled weights \(\.bin\) are not read"


def of_another_model(folder: Path) -> str:
    described = json.loads((folder / "config.json").read_text())
    layers = described["num_hidden_layers"] + 1
    kinds = {"layer_types": ["full_attention"] * layers}
    (folder / "config.json").write_text(
        json.dumps({**described, **kinds, "num_hidden_layers": layers})
    )
    return r"the safetensors lack model\.layers\.2\."


BROKEN = (cut_off, another_part, missing_part, pickled, of_another_model)


@pytest.mark.parametrize("damage", BROKEN)
def test_weights_that_cannot_be_used_are_refused(damage: Any, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=damage(whole)):
        fetch_weights(config(whole, tmp_path))


def test_a_run_whose_weights_cannot_be_used_takes_no_earlier_run_away(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(whole, tmp_path)
    run.folder.mkdir()
    (run.folder / "run.toml").write_text(run.to_toml(), encoding="utf-8")
    (run.folder / "metrics.jsonl").write_text("{}\n", encoding="utf-8")

    def later(*_: object, **__: object) -> None:
        raise AssertionError("the text is prepared only after the weights are there")

    monkeypatch.setattr(preflight, "check_tokenizer", passes)
    monkeypatch.setattr(preflight, "check_model", passes)
    monkeypatch.setattr(preflight, "prepare_data", later)
    pickled(whole)
    with pytest.raises(ModelError, match="pickled"):
        local.train_here(run, Hooks(), resume=False, overwrite=True, debug=False)
    assert (run.folder / "metrics.jsonl").exists()


def test_a_site_has_its_weights_before_it_enrols(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(*_: object, **__: object) -> None:
        raise AssertionError("enrolled")

    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preflight, "check_model", passes)
    monkeypatch.setattr(preflight, "prepare_data", later)
    monkeypatch.setattr(local, "keep_site", later)
    pickled(whole)
    endpoint = Endpoint.at("localhost:1", "paris", f"dilocox1-{64 * '0'}-{32 * '0'}")
    with pytest.raises(ModelError, match="pickled"):
        local.join(config(whole, tmp_path), site="paris", endpoint=endpoint, debug=False)


def test_a_download_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no such host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(ModelError, match="the download failed"):
        prefetch._fetch(config("some/model", tmp_path), lambda *_: None)
