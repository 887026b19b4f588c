"""Adapters of PEFT from which a run starts: which are taken, and what the others are told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dilocox.config.adapter import AdapterSection
from dilocox.config.model import ModelSection
from dilocox.errors import ConfigError, ModelError
from dilocox.models.adapter_weights import AdapterWeights
from dilocox.models.architecture import load_model_config
from dilocox.models.start_adapters import check_start_adapters, named_base
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from tests.support.base_model import peft_folder, write_base

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PLAIN = AdapterSection(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("start") / "base")


def checked(base: Path, folder: Path, adapter: AdapterSection = PLAIN) -> AdapterWeights:
    """Check the folder; the first weights of a run that starts from it."""
    config = load_model_config(ModelSection(path=str(base)), None)
    check_start_adapters(str(folder), config, adapter)
    return AdapterWeights(config, adapter, 0, None, folder)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_first_values_are_those_of_the_folder(
    base: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    folder = peft_folder(base, tmp_path / "peft", dtype)
    weights, stored = checked(base, folder), load_file(folder / ADAPTER_FILE)
    assert weights.shapes.keys() == stored.keys()
    for name, value in stored.items():
        found = weights.tensor(name)
        assert found.dtype == torch.float32
        assert torch.equal(found, value.float())
    assert named_base(str(folder)) == str(base)


def test_some_layers_with_rslora(base: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}
    folder = peft_folder(base, tmp_path / "peft", init_lora_weights="gaussian", **keys)
    some = AdapterSection(rank=2, alpha=4.0, targets=["v_proj", "q_proj"], use_rslora=True)
    assert len(checked(base, folder, some).shapes) == 8
    with pytest.raises(ConfigError, match=r"adapter\.use_rslora: false, .* have true; set"):
        checked(base, folder, some.model_copy(update={"use_rslora": False}))
    with pytest.raises(ConfigError, match=r'set adapter\.targets to .*, \["q_proj", "v_proj"\]'):
        checked(base, folder, some.model_copy(update={"targets": "all-linear"}))


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"rank": 4}, r"adapter\.rank: 4, but the adapters in \S+ have 2; set adapter\.rank = 2"),
        ({"alpha": 8.0}, r"adapter\.alpha: 8\.0, but .* have 4; set adapter\.alpha = 4"),
    ],
)
def test_other_settings_are_named(
    base: Path, tmp_path: Path, adapter: dict[str, Any], said: str
) -> None:
    folder = peft_folder(base, tmp_path / "peft")
    with pytest.raises(ConfigError, match=said):
        checked(base, folder, PLAIN.model_copy(update=adapter))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"use_dora": True}, "has use_dora, and a run starts from plain LoRA alone; merge"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save, and"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern, and"),
        ({"bias": "all"}, "has bias, and"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"has \S*embed_tokens\S*, and"),
        ({"init_lora_weights": "pissa"}, 'has init_lora_weights "pissa", and'),
    ],
)
def test_more_than_plain_lora_is_refused(
    base: Path, tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    folder = peft_folder(base, tmp_path / "peft", **keys)
    with pytest.raises(ConfigError, match=said):
        checked(base, folder)


def no_weights(folder: Path) -> None:
    (folder / ADAPTER_FILE).unlink()


def not_json(folder: Path) -> None:
    (folder / ADAPTER_CONFIG).write_text("{")


def another_kind(folder: Path) -> None:
    (folder / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LOHA"}))


def cut_off(folder: Path) -> None:
    (folder / ADAPTER_FILE).write_bytes((folder / ADAPTER_FILE).read_bytes()[:100])


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / ADAPTER_FILE)


def overflowing(folder: Path) -> None:
    tensors = {n: each.double() * 1e300 for n, each in load_file(folder / ADAPTER_FILE).items()}
    save_file(tensors, folder / ADAPTER_FILE)


def some_layers(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    kept = {name: each for name, each in tensors.items() if ".layers.0." in name}
    save_file(kept, folder / ADAPTER_FILE)


def pickled(folder: Path) -> None:
    (folder / ADAPTER_FILE).rename(folder / "adapter_model.bin")


def below(folder: Path) -> None:
    (folder / "sft").mkdir()
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        (folder / name).rename(folder / "sft" / name)


def nested(folder: Path) -> None:
    (folder / ADAPTER_CONFIG).write_text("[" * 100_000)


def wider(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    name = next(name for name in tensors if ".lora_A." in name)
    save_file({**tensors, name: torch.zeros(2, 48)}, folder / ADAPTER_FILE)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (shutil.rmtree, ModelError, "no such folder; name a folder with adapter_model"),
        (no_weights, ModelError, "needs adapter_config.json and adapter_model.safetensors"),
        (pickled, ModelError, "pickled adapters are not read: save them again with peft"),
        (below, ModelError, "its folder sft/ has adapters: name that one"),
        (nested, ModelError, "adapter_config.json: cannot be read"),
        (overflowing, ModelError, "has values that are not finite"),
        (some_layers, ConfigError, "all layers of a kind, and on no others: name the base model"),
        (not_json, ModelError, "adapter_config.json: cannot be read"),
        (another_kind, ConfigError, "has peft_type LOHA, and a run starts from plain LoRA"),
        (cut_off, ModelError, "adapter_model.safetensors: cannot be read"),
        (not_finite, ModelError, "has values that are not finite"),
        (wider, ConfigError, r"is \[2, 48\], and this run's is \[2, \d+\]; name the base"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(
    base: Path, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], said: str
) -> None:
    folder = peft_folder(base, tmp_path / "peft")
    damage(folder)
    with pytest.raises(error, match=said):
        checked(base, folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64])
def test_what_other_programs_write(base: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Other types, defaults left out, and the base model's configuration beside the adapters."""
    folder = peft_folder(base, tmp_path / "peft", r=8, lora_alpha=8)
    tensors = load_file(folder / ADAPTER_FILE)
    save_file({name: each.to(dtype) for name, each in tensors.items()}, folder / ADAPTER_FILE)
    said = json.loads((folder / ADAPTER_CONFIG).read_text())
    for key in ("r", "lora_alpha", "use_rslora", "bias"):
        del said[key]
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**said, "init_lora_weights": "Gaussian"}))
    shutil.copy(base / "config.json", folder)
    weights = checked(base, folder, AdapterSection(rank=8, alpha=8.0))
    for name, value in tensors.items():
        assert torch.equal(weights.tensor(name), value.to(dtype).float())
    with pytest.raises(ConfigError, match=r"adapter\.rank: 2, .* have 8; set adapter\.rank = 8"):
        checked(base, folder)


def test_a_name_of_the_hub_is_told_how_to_get_it(base: Path) -> None:
    with pytest.raises(ModelError, match="hf download org/adapters --local-dir FOLDER"):
        checked(base, Path("org/adapters"))
