"""Checks adapters of another program or run from which a run starts (`adapter.path`).

The folder may come from a stranger, so no code in it is run and no pickle is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dilocox.config.adapter import AdapterSection
from dilocox.errors import ConfigError, ModelError
from dilocox.models.adapter import adapter_shapes, inject, stored_name
from dilocox.models.adapter_weights import AdapterWeights
from dilocox.models.architecture import one_line
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from dilocox.utils.file_errors import names_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SAME: Mapping[str, tuple[str, Any]] = {
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8),
    "use_rslora": ("use_rslora", False),
}
"""Keys of `[adapter]` that must be those of the folder: their names and defaults in PEFT."""
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
_PLAIN = re.compile(r"\.([^.]+)\.lora_[AB]\.weight$")
"""Names of tensors of plain LoRA on linear layers. The group is the last part of the layer's."""
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
    _check_files(path, folder)
    check_settings(path, adapter)
    _check_tensors(path, folder, adapter_shapes(hf_config, adapter))


def check_settings(path: str, adapter: AdapterSection) -> None:
    """Check that the PEFT folder `path` is of plain LoRA with the settings of `[adapter]`.

    Raises `ModelError` if its configuration cannot be read, and `ConfigError` if it differs.
    """
    said = _configuration(Path(path).expanduser())
    _check_kind(path, said)
    for ours, (theirs, default) in _SAME.items():
        given, wanted = said.get(theirs), getattr(adapter, ours)
        has = default if given is None else given
        if has != wanted:
            raise ConfigError(
                f"adapter.{ours}: {_toml(wanted)}, but the adapters in {path} have {_toml(has)}; "
                f"set adapter.{ours} = {_toml(has)}, or leave adapter.path out"
            )


def start_digest(weights: AdapterWeights, adapter: AdapterSection) -> str:
    """Return the SHA-256, hex, of what a model's first adapters compute.

    The digest covers the scaling, and names, shapes and fp32 values of all adapters' tensors. The
    type of the stored values and the division into files do not matter. Raises `ModelError` if a
    tensor cannot be read.
    """
    digest = hashlib.sha256(json.dumps(adapter.scaling).encode())
    for name, shape in weights.shapes.items():
        digest.update(json.dumps([name, list(shape)]).encode())
        digest.update(weights.tensor(name).contiguous().numpy().tobytes())
    return digest.hexdigest()


def add_adapters(
    model: nn.Module, weights: AdapterWeights, adapter: AdapterSection, dtype: torch.dtype
) -> None:
    """Add adapters with the values of `weights` to a whole model on the CPU, in place.

    `dtype`: of the computation. Raises the errors of `inject`, and `ModelError` if a tensor cannot
    be read.
    """
    inject(model, adapter)
    for name, parameter in model.named_parameters():
        if stored_name(name) in weights.shapes:
            parameter.data = weights.tensor(stored_name(name)).to(dtype)


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
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read ({one_line(error)}); copy it again") from None
    if not isinstance(said, dict):
        raise ModelError(f"{file}: is not an object; copy it again")
    return said


def _check_files(path: str, folder: Path) -> None:
    """Raise `ModelError` unless the folder has the two files of adapters."""
    if not folder.is_dir():
        of_hub = "" if names_folder(path) else f" (hf download {path} --local-dir FOLDER)"
        raise ModelError(
            f"adapter.path {path}: no such folder; name a folder with {ADAPTER_FILE}{of_hub}"
        )
    # Some programs write the base model's config.json beside them.
    if (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_FILE).is_file():
        return
    mend = (
        "name a folder that save_pretrained of peft has written, or model/ of a run with adapters"
    )
    below = sorted(each.parent.name for each in folder.glob(f"*/{ADAPTER_FILE}"))
    if below:
        mend = f"its folder {below[0]}/ has adapters: name that one"
    elif (folder / ADAPTER_CONFIG).is_file():
        mend = "pickled adapters are not read: save them again with peft, as safetensors"
    raise ModelError(f"adapter.path {path}: needs {ADAPTER_CONFIG} and {ADAPTER_FILE}; {mend}")


def _check_kind(path: str, said: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for adapters that are not plain LoRA."""
    kind, first = said.get("peft_type"), said.get("init_lora_weights", True)
    other = None if kind == "LORA" else f"peft_type {kind}"
    other = next((key for key in sorted(said.keys() - set(_KNOWN)) if said[key]), other)
    if (said.get("bias") or "none") != "none":
        other = "bias"
    if not isinstance(first, bool | None) and str(first).lower() not in _HARMLESS:
        # Such first values belong to a base model that is changed in the same moment.
        other = f'init_lora_weights "{first}"'
    if other is not None:
        raise _not_plain(path, other)


def _not_plain(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"adapter.path {path}: has {what}, and a run starts from plain LoRA alone; merge the "
        "adapters into their base model (merge_and_unload of peft), name the merged model in "
        "model.path, and leave adapter.path out"
    )


def _check_tensors(path: str, folder: Path, shapes: Mapping[str, torch.Size]) -> None:
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
                raise ConfigError(f"adapter.path {path}: {there} {name}; {_mend(names, shapes)}")
            for name, shape in shapes.items():
                found = opened.get_tensor(name)
                if found.shape != shape or not found.is_floating_point():
                    raise ConfigError(
                        f"adapter.path {path}: {name} is {list(found.shape)}, and this run's is "
                        f"{list(shape)}; name the base model of these adapters in model.path"
                    )
                if not bool(found.float().isfinite().all()):
                    raise ModelError(
                        f"adapter.path {path}: {name} has values that are not finite; name other "
                        "adapters"
                    )
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read ({one_line(error)}); copy it again") from None


def _mend(names: Set[str], shapes: Mapping[str, torch.Size]) -> str:
    """Return what helps if the folder's tensors, `names`, are not those of the run, `shapes`."""
    theirs, ours = (
        sorted({found[1] for name in each if (found := _PLAIN.search(name))})
        for each in (names, shapes)
    )
    if theirs != ours:
        return f"set adapter.targets to the layers of these adapters, {_toml(theirs)}"
    return (
        "a run has adapters on all layers of a kind, and on no others: name the base model of "
        "these adapters in model.path, or merge them into it, and leave adapter.path out"
    )


def _toml(value: Any) -> str:
    return json.dumps(value)
