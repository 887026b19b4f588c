"""Checks adapters of another program or run from which a run starts (`adapter.path`).

The folder may come from a stranger, so no code in it is run and no pickle is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from dilocox.config.adapter import AdapterSection
from dilocox.errors import ConfigError, ModelError
from dilocox.models.adapter import adapter_shapes
from dilocox.models.architecture import one_line
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, is_adapter_folder
from dilocox.utils.file_errors import names_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SAME = {"rank": "r", "alpha": "lora_alpha", "use_rslora": "use_rslora"}
"""Keys of `[adapter]` that must be those of the folder, and their names in PEFT's configuration."""
_KNOWN = (
    "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
    # Of first values, which `init_lora_weights` names.
    "corda_config", "eva_config", "loftq_config", "lora_ga_config",
)  # fmt: skip
"""Keys of PEFT's configuration that plain LoRA may set. Any other key that is set stands for
adapters that compute or hold more; newer releases of PEFT add such keys."""
_PLAIN = re.compile(r"\.lora_[AB]\.weight$")
"""Names of tensors of plain LoRA on linear layers."""
_HARMLESS = ("gaussian", "eva", "orthogonal")
"""First values of PEFT that leave the base model as it is, beside true and false."""


def check_start_adapters(path: str, hf_config: PretrainedConfig, adapter: AdapterSection) -> None:
    """Check that a run with `[adapter]` can start from the PEFT folder `path`.

    Args:
        path: `adapter.path`.
        hf_config: configuration of the base model.
        adapter: section `[adapter]` of the run file.

    Raises:
        ModelError: if the folder cannot be read, or its values are not finite.
        ConfigError: if the folder has other adapters than the run.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        of_hub = "" if names_folder(path) else f" (hf download {path} --local-dir FOLDER)"
        raise ModelError(
            f"adapter.path {path}: no such folder; name a folder with {ADAPTER_FILE}{of_hub}"
        )
    if not is_adapter_folder(folder) or not (folder / ADAPTER_FILE).is_file():
        raise ModelError(
            f"adapter.path {path}: needs {ADAPTER_CONFIG} and {ADAPTER_FILE}; name a folder that "
            "save_pretrained of peft has written, or model/ of a run with adapters"
        )
    said = _configuration(folder)
    _check_kind(path, said)
    for ours, theirs in _SAME.items():
        has, wanted = said.get(theirs, False), getattr(adapter, ours)
        if has != wanted:
            raise ConfigError(
                f"adapter.{ours}: {_toml(wanted)}, but the adapters in {path} have {_toml(has)}; "
                f"set adapter.{ours} = {_toml(has)}, or leave adapter.path out"
            )
    _check_tensors(path, folder, said, adapter_shapes(hf_config, adapter))


def named_base(path: str) -> str | None:
    """Return the base model that the PEFT folder `path` names; None if it names none.

    Raises `ModelError` if the configuration cannot be read.
    """
    name = _configuration(Path(path).expanduser()).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _configuration(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read ({one_line(error)}); copy it again") from None
    if not isinstance(said, dict):
        raise ModelError(f"{file}: is not an object; copy it again")
    return said


def _check_kind(path: str, said: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for adapters that are not plain LoRA."""
    kind, first = said.get("peft_type"), said.get("init_lora_weights", True)
    other = None if kind == "LORA" else f"peft_type {kind}"
    other = next((key for key in sorted(said.keys() - set(_KNOWN)) if said[key]), other)
    if said.get("bias", "none") != "none":
        other = "bias"
    if other is not None:
        raise _not_plain(path, other)
    if not isinstance(first, bool | None) and first not in _HARMLESS:
        raise ConfigError(
            f'adapter.path {path}: init_lora_weights = "{first}" belongs to a changed base model; '
            "let peft convert the adapters (path_initial_model_for_weight_conversion of "
            "save_pretrained), and name the converted folder"
        )


def _not_plain(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"adapter.path {path}: has {what}, and a run starts from plain LoRA alone; merge the "
        "adapters into their base model (merge_and_unload of peft), name the merged model in "
        "model.path, and leave adapter.path out"
    )


def _check_tensors(
    path: str, folder: Path, said: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> None:
    """Check names, shapes and values of the folder's tensors against the run's, `shapes`."""
    file = folder / ADAPTER_FILE
    try:
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            foreign = next((name for name in sorted(names) if not _PLAIN.search(name)), None)
            if foreign is not None:
                raise _not_plain(path, foreign)
            for name in sorted(names ^ shapes.keys()):
                there = "has no" if name in shapes else "also has"
                raise ConfigError(
                    f"adapter.path {path}: {there} {name}; set adapter.targets to the layers of "
                    f"these adapters, {_targets(said)}, on their base model"
                )
            for name, shape in shapes.items():
                found = opened.get_tensor(name)
                if found.shape != shape or not found.is_floating_point():
                    raise ConfigError(
                        f"adapter.path {path}: {name} is {list(found.shape)}, and this run's is "
                        f"{list(shape)}; name the base model of these adapters in model.path"
                    )
                if not math.isfinite(float(found.abs().max())):
                    raise ModelError(
                        f"adapter.path {path}: {name} has values that are not finite; name other "
                        "adapters"
                    )
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read ({one_line(error)}); copy it again") from None


def _targets(said: Mapping[str, Any]) -> str:
    """Return `adapter.targets` for the layers that PEFT's configuration names."""
    named = said.get("target_modules")
    if not isinstance(named, list):
        return _toml(named)
    return _toml(sorted({str(name).rpartition(".")[2] for name in named}))


def _toml(value: Any) -> str:
    return json.dumps(value)
