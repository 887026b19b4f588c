"""Builds the whole model on the meta device (a skeleton), and finds the names of its parts.

A skeleton takes no memory for weights, whatever the model's size. Cutting, counting, fresh
initialisation and name translation all start from a skeleton.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilocox.errors import ModelError
from dilocox.models.architecture import one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Layout:
    """Names of the parts of a model type.

    `body` and `head` are module paths in the model. The other names are children of the body.
    """

    body: str
    """The module that runs the layers."""
    embedding: str
    """The token embedding."""
    entry: tuple[str, ...]
    """Modules between embedding and first layer, each from one tensor to one tensor."""
    positions: str | None
    """A learned position embedding that the body itself adds to its input; None if there is none.
    """
    layers: str
    """The list of layers."""
    exit: tuple[str, ...]
    """Modules after the last layer, each from one tensor to one tensor."""
    head: str
    """The output projection."""

    @property
    def layer_prefix(self) -> str:
        """Prefix of all names inside the layers, up to the layer number."""
        return f"{self.body}.{self.layers}."


def build_skeleton(
    hf_config: PretrainedConfig,
    *,
    attention: str = "eager",
    dtype: torch.dtype = torch.float32,
    device: str = "meta",
) -> nn.Module:
    """Returns the whole causal LM, with a copy of `hf_config` as its configuration.

    Args:
        hf_config: configuration of the model.
        attention: attention implementation. It matters only if the model runs; every model type
            supports "eager".
        dtype: data type of the parameters. Tensors of `kept_in_fp32` are fp32 in any case.
        device: device of the model.

    Raises:
        ModelError: if transformers cannot build the model.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(hf_config)
    config.use_cache = False
    if attention == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        # Some releases of transformers silently ignore the cap instead of refusing the model.
        raise ModelError(
            f'model type "{hf_config.model_type}" caps attention logits '
            f"(attn_logit_softcapping = {config.attn_logit_softcapping}), which attention "
            f'"{attention}" does not support; set model.attention = "eager"'
        )
    try:
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # modelling code may raise anything at values it cannot use
        mend = "check the values of its configuration"
        if attention != "eager":
            mend += ', or set model.attention = "eager"'
        raise ModelError(
            f'model type "{hf_config.model_type}" cannot be built with attention "{attention}" '
            f"({one_line(error)}); {mend}"
        ) from None
    if dtype is not torch.float32:
        _keep_in_fp32(model)
    return model


def kept_in_fp32(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Returns those of `names` whose tensors the model type keeps in fp32, whatever it computes in.

    Such tensors are the biases and, in some types, the weights of a mixture's routers. Loading by
    transformers in bf16 leaves them in fp32, too. `names` are names in the model's state dict.
    """
    patterns = sorted(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not patterns:
        return set()
    # The patterns are read as transformers reads them.
    found = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns))
    return {name for name in names if found.search(name)}


def _keep_in_fp32(model: nn.Module) -> None:
    """Turn the tensors of `kept_in_fp32` back to fp32, in place. The model is on "meta"."""
    for name in kept_in_fp32(model, model.state_dict()):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        parameter, buffer = module._parameters.get(last), module._buffers.get(last)
        if parameter is not None:
            parameter.data = parameter.data.float()
        elif buffer is not None and buffer.is_floating_point():
            module._buffers[last] = buffer.float()


_kept: dict[str, nn.Module] = {}
"""The last skeleton of `skeleton_to_read`, by its configuration."""


def skeleton_to_read(hf_config: PretrainedConfig) -> nn.Module:
    """Returns a skeleton that its users do not change; see `build_skeleton`.

    The start of a run and a plan ask for it many times. So the last one is kept.
    """
    key = hf_config.to_json_string(use_diff=False)
    model = _kept.get(key)
    if model is None:
        model = build_skeleton(hf_config)
        _kept.clear()
        _kept[key] = model
    return model


def find_layout(model: nn.Module) -> Layout:
    """Returns the layout of a whole model; see `build_skeleton`.

    Raises `ModelError` if a parameter is outside all parts of the layout, or belongs to two layers,
    because no chunk could own such a parameter alone.
    """
    config: Any = model.config
    head = _name_of(model, model.get_output_embeddings())  # type: ignore[operator]
    if config.model_type == "opt":
        # OPT has no pipeline plan in transformers. It has learned positions and two projections.
        layout = Layout(
            body="model.decoder",
            embedding="embed_tokens",
            entry=("project_in",),
            positions="embed_positions",
            layers="layers",
            exit=("final_layer_norm", "project_out"),
            head=head,
        )
    else:
        plan = dict(config.base_model_pp_plan)
        names = list(plan)
        if "layers" not in plan or names.index("layers") == 0:
            raise ModelError(
                f'model type "{config.model_type}": its pipeline plan ({", ".join(names)}) is not '
                "embedding, layers, norm; it cannot be cut: use another model type"
            )
        at = names.index("layers")
        layout = Layout(
            body=str(model.base_model_prefix),
            embedding=names[0],
            entry=tuple(names[1:at]),
            positions=None,
            layers="layers",
            exit=tuple(names[at + 1 :]),
            head=head,
        )
    _check_owned(model, layout)
    return layout


def tied_pair(hf_config: PretrainedConfig) -> tuple[str, str] | None:
    """Returns the full names (embedding, head) of tied weights, or None if they are not tied.

    The embedding is the owner of the weights, and the head is the copy.
    """
    return tied_names(skeleton_to_read(hf_config))


def tied_names(model: nn.Module) -> tuple[str, str] | None:
    """Returns the `tied_pair` of a whole model.

    Raises `ModelError` if the model ties other parameters.
    """
    tied: dict[str, str] = dict(model.all_tied_weights_keys)  # type: ignore[arg-type]
    if not tied:
        return None
    layout = find_layout(model)
    expected = {f"{layout.head}.weight": f"{layout.body}.{layout.embedding}.weight"}
    if tied != expected:
        raise ModelError(
            f"the model ties {', '.join(sorted(tied))}; only a head tied to the embedding can be "
            "cut: use an untied model"
        )
    ((head, embedding),) = tied.items()
    return embedding, head


def count_parameters(hf_config: PretrainedConfig) -> int:
    """Returns the number of parameters of the model; tied parameters count once."""
    return sum(parameter.numel() for parameter in skeleton_to_read(hf_config).parameters())


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    for name, module in model.named_modules():
        if module is wanted:
            return str(name)
    raise ModelError(f"{type(model).__name__} has no output projection; it cannot be trained")


def _check_owned(model: nn.Module, layout: Layout) -> None:
    parts = (layout.embedding, layout.positions, layout.layers, *layout.entry, *layout.exit)
    prefixes = [f"{layout.body}.{part}." for part in parts if part is not None]
    prefixes.append(f"{layout.head}.")
    state = model.state_dict(keep_vars=True)
    layer_of: dict[int, str] = {}
    for name, tensor in state.items():
        if not any(name.startswith(prefix) for prefix in prefixes):
            raise ModelError(
                f'model type "{model.config.model_type}": {name} is outside embedding, layers, '  # type: ignore[union-attr]
                "norm and head, so no stage would own it; use another model type"
            )
        if name.startswith(layout.layer_prefix):
            number = name[len(layout.layer_prefix) :].partition(".")[0]
            if layer_of.setdefault(id(tensor), number) != number:
                raise ModelError(
                    f"{name} is shared between layers {layer_of[id(tensor)]} and {number}; "
                    "such a model cannot be cut: use another model type"
                )
