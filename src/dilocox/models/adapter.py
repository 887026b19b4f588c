"""Adapters of the package peft in a model on the meta device, and the names of their tensors.

Adapters are added to the whole model before it is cut into chunks, so that chunks, FSDP and
activation checkpointing treat them like any other part of a layer.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilocox.config.adapter import AdapterSection
from dilocox.errors import ConfigError, ModelError
from dilocox.models.architecture import one_line
from dilocox.models.meta_model import build_skeleton, find_layout, skeleton_to_read
from dilocox.models.nf4 import ignore_optional_kernels

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig

PREFIX = "base_model.model."
"""Prefix of the names of adapters' tensors in PEFT's files."""
_NAME = "default"
"""PEFT's name of a model's only adapter. Files leave the name out."""
_TENSORS = re.compile(rf"(lora_[AB])\.{_NAME}\.")


def check_peft() -> None:
    """Raise `ConfigError` if the package peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[adapter]: needs the package peft, which is not installed here; run: "
            "pip install 'dilocox[adapters]', or remove [adapter]"
        )
    ignore_optional_kernels()


def is_adapter(full_name: str) -> bool:
    """Return True if `full_name` is the name of an adapter's tensor, as PEFT's files have it."""
    return full_name.startswith(PREFIX)


def is_trained(full_name: str, adapter: AdapterSection) -> bool:
    """Return True if the run trains the adapter's tensor `full_name`.

    With `adapter.freeze_a`, A keeps its first values.
    """
    return not (adapter.freeze_a and ".lora_A." in full_name)


def stored_name(name: str) -> str:
    """Return the name in files of a tensor of a model with adapters.

    A tensor of the frozen model has the name in the model without adapters. A tensor of an adapter
    has the name in PEFT's `adapter_model.safetensors`.
    """
    found, count = _TENSORS.subn(r"\1.", name)
    return PREFIX + found if count else name.replace(".base_layer.", ".")


def inject(model: nn.Module, adapter: AdapterSection) -> tuple[str, ...]:
    """Add adapters to a whole model on the meta device, in place, and freeze everything else.

    Trained adapters are fp32, whatever the dtype of the model. Matrices that keep their first
    values have the dtype of the model. Returns the last parts of the names of the
    layers that have one, sorted.

    Raises `ConfigError` if peft is not installed, or if the model has no such layers. Raises
    `ModelError` if peft cannot add adapters to the model, or adds them to other parts of it.
    """
    check_peft()
    names = _targets(model, adapter)
    from peft import inject_adapter_in_model

    wanted = {name for name in _linear_layers(model) if name.rpartition(".")[2] in names}
    dtype = next(model.parameters()).dtype
    try:
        inject_adapter_in_model(lora_config(adapter, names), model, _NAME)
    except Exception as error:  # the package raises many kinds
        raise ModelError(
            f"[adapter]: peft cannot add adapters to {type(model).__name__} ({one_line(error)}); "
            "choose other adapter.targets, or remove [adapter]"
        ) from None
    _check_injected(model, wanted)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained = is_trained(name, adapter)
            parameter.data = parameter.data.to(torch.float32 if trained else dtype)
            parameter.requires_grad_(trained)
    return names


def lora_config(adapter: AdapterSection, names: Iterable[str], **more: Any) -> LoraConfig:
    """Return PEFT's configuration of the adapters of the layers `names`.

    `more`: further keys, such as `base_model_name_or_path`.
    """
    from peft import LoraConfig

    # Whole numbers are written as such, as in most folders of adapters.
    alpha: Any = int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.use_rslora,
        target_modules=sorted(names),
        bias="none",
        **more,
    )


def target_names(hf_config: PretrainedConfig, adapter: AdapterSection) -> tuple[str, ...]:
    """Return the last parts of the names of the layers that get an adapter, sorted.

    Raises `ConfigError` if the model has no such layers.
    """
    return _targets(skeleton_to_read(hf_config), adapter)


def adapter_shapes(hf_config: PretrainedConfig, adapter: AdapterSection) -> dict[str, torch.Size]:
    """Return the whole shapes of all adapters' tensors by PEFT's name, in model order.

    Raises the errors of `inject`.
    """
    model = build_skeleton(hf_config)
    inject(model, adapter)
    names = ((stored_name(name), parameter.shape) for name, parameter in model.named_parameters())
    return {name: shape for name, shape in names if is_adapter(name)}


def trained_shapes(hf_config: PretrainedConfig, adapter: AdapterSection) -> dict[str, torch.Size]:
    """Return the whole shapes of all trained tensors by PEFT's name, in model order.

    Raises the errors of `inject`.
    """
    shapes = adapter_shapes(hf_config, adapter)
    return {name: shape for name, shape in shapes.items() if is_trained(name, adapter)}


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of all linear layers inside the model's layers, in model order."""
    # GPT-2 has linear layers of a class of transformers' own.
    from transformers.pytorch_utils import Conv1D

    inside = find_layout(model).layer_prefix
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.startswith(inside)
    ]


def _check_injected(model: nn.Module, wanted: set[str]) -> None:
    """Raise `ModelError` unless exactly the layers `wanted` have an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name in [*sorted(found - wanted), *sorted(wanted - found)]:
        fault = (
            f"adds an adapter to {name}, which is no linear layer of adapter.targets"
            if name in found
            else f"adds no adapter to the linear layer {name}"
        )
        raise ModelError(
            f"[adapter]: peft {fault}; choose adapter.targets of attention alone, such as "
            '["q_proj", "v_proj"], or remove [adapter]'
        )


def _names_of_experts(model: nn.Module, names: Iterable[str], adapter: AdapterSection) -> set[str]:
    """Return those of `names` that PEFT takes for the experts of a mixture, and not for layers.

    transformers keeps the experts of a layer in one tensor, where earlier releases had linear
    layers. For some model types PEFT puts adapters on these tensors if it is given a former name,
    such as `down_proj`. It then passes over linear layers of that name, such as those of shared
    experts, and readers of the published folder do so, too.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a release without the function; `inject` checks what PEFT has done
        return set()
    found = set()
    for name in names:
        config = lora_config(adapter, [name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # only one of several layers that are in one tensor now
            found.add(name)
        else:
            if config.target_parameters:
                found.add(name)
    return found


def _targets(model: nn.Module, adapter: AdapterSection) -> tuple[str, ...]:
    """Return the last parts of the names of the layers to adapt, after checking that they exist."""
    every = {name.rpartition(".")[2] for name in _linear_layers(model)}
    experts = _names_of_experts(model, every, adapter)
    linear = every - experts
    kind = f'model type "{model.config.model_type}"'  # type: ignore[union-attr]
    if not linear:
        raise ConfigError(
            f"[adapter]: {kind} has no linear layers that could get an adapter; use another model, "
            "or remove [adapter]"
        )
    if adapter.targets == "all-linear":
        return tuple(sorted(linear))
    for name in adapter.targets:
        if name in experts:
            raise ConfigError(
                f"adapter.targets: peft takes {name!r} of {kind} for its experts, which get no "
                f"adapters; leave {name!r} out: the type has {', '.join(sorted(linear))}"
            )
        if name not in linear:
            near = difflib.get_close_matches(name, linear, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"adapter.targets: {kind} has no linear layer {name!r} in its layers; {hint}it has "
                f"{', '.join(sorted(linear))}"
            )
    _check_inside(model, adapter.targets)
    return tuple(sorted(adapter.targets))


def _check_inside(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise `ConfigError` if a linear layer outside the model's layers has a name of `targets`."""
    from transformers.pytorch_utils import Conv1D

    inside = find_layout(model).layer_prefix
    for name, module in model.named_modules():
        linear = isinstance(module, nn.Linear | Conv1D) and name.rpartition(".")[2] in targets
        if linear and not name.startswith(inside):
            raise ConfigError(
                f"adapter.targets: {name} is outside the model's layers, where adapters are not "
                "trained; choose other names"
            )
