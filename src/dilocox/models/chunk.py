"""Builds one chunk: the model's own code without the layers of all other chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilocox.config.adapter import AdapterSection
from dilocox.models.activation_checkpointing import Checkpointing, recompute
from dilocox.models.adapter import inject, stored_name
from dilocox.models.meta_model import (
    Layout,
    build_skeleton,
    find_layout,
    kept_in_fp32,
    tied_names,
)
from dilocox.models.module_copies import Given, replaced
from dilocox.models.nf4 import pack_layers
from dilocox.models.packed_rows import packed_arguments, packed_rows, unpacked_rows
from dilocox.models.partition import ChunkSpec
from dilocox.models.router_loss import router_loss, router_loss_factor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [b, l, d] -> logits [b, l, V]."""

HeadLoss = Callable[[Logits, torch.Tensor, torch.Tensor, list[torch.Tensor], int], torch.Tensor]
"""(logits function, hidden states [b, l, d], labels int64 [b, l], parameters of the head, V) ->
loss, a scalar."""


class ModelChunk(nn.Module):
    """Consecutive layers of a causal LM, usable as the module of a pipeline stage.

    `forward` takes token ids (int64 [B, L]) if the chunk has the embedding, else hidden states
    [B, L, d]. It returns logits [B, L, V] if the chunk has the head, else hidden states [B, L, d].
    Every token attends to all tokens before it in its row. With `positions` (int64 [B, L]), which
    restart with each document of a row, it attends to those of its document alone. There is no
    padding mask: padding behind the documents of a row is a document of its own.

    If `head_loss` is set, a chunk with the head that is given `labels` (int64 [B, L]) returns the
    loss, a scalar, instead of logits. Other chunks ignore labels. Where gradients are computed, the
    loss includes the load-balancing loss of a mixture of experts if the configuration asks for it.
    """

    head_loss: HeadLoss | None = None
    """Computes the loss from hidden states. None: the chunk always returns logits."""
    sums_labels = False
    """Whether `head_loss` is a sum over labels of 0 or above, not their mean."""

    def __init__(
        self,
        lm: nn.Module,
        spec: ChunkSpec,
        layout: Layout,
        tied: tuple[str, str] | None,
        adapted: bool = False,
    ):
        super().__init__()
        self.lm = lm
        self.spec = spec
        self._layout = layout
        self._adapted = adapted
        self._names = self._translate(tied)
        self._router_factor = router_loss_factor(lm)
        kept = kept_in_fp32(lm, self._names.values())
        self.kept_in_fp32 = frozenset(name for name, full in self._names.items() if full in kept)
        """Local names of the tensors that the model type keeps in fp32, whatever it computes in."""

    @property
    def layers(self) -> list[nn.Module]:
        """The chunk's layers, first to last (for FSDP wrapping)."""
        body = self.lm.get_submodule(self._layout.body)
        return list(body.get_submodule(self._layout.layers).children())

    @property
    def embedding(self) -> nn.Module | None:
        """The token embedding (for FSDP wrapping); None if this chunk does not have it."""
        if not self.spec.embeds:
            return None
        return self.lm.get_submodule(f"{self._layout.body}.{self._layout.embedding}")

    @property
    def closing(self) -> list[nn.Module]:
        """Modules after the last layer, in order of use, with the head last (for FSDP wrapping).

        The list is empty unless this chunk has the head and at least one other module after the
        layers. Every forward pass calls that module.
        """
        body = self.lm.get_submodule(self._layout.body)
        before = [getattr(body, name) for name in self._layout.exit] if self.spec.head else []
        before = [module for module in before if module is not None]
        return [*before, self.lm.get_submodule(self._layout.head)] if before else []

    def full_names(self) -> dict[str, str]:
        """Returns the names of parameters and saved buffers in the whole model's state dict.

        Keys are the names in this chunk. With adapters, frozen tensors have the names of the model
        without adapters, and trained tensors have PEFT's names. A tied head in the same chunk as
        its embedding is left out, since it is the same parameter. A tied head in another chunk has
        the head's own name.
        """
        return dict(self._names)

    def full_name(self, local_name: str) -> str:
        """Returns the name of one parameter or saved buffer in the whole model.

        Raises `KeyError` if the chunk has no such parameter or buffer.
        """
        return self._names[local_name]

    def saved_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that the whole model's state dict contains, by their full names."""
        return {
            self._names[name]: buffer
            for name, buffer in self.named_buffers()
            if name in self._names
        }

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the chunk. See the class for shapes."""
        given: dict[str, Any] = {"input_ids": x} if self.spec.embeds else {"inputs_embeds": x}
        body: Any = self.lm.get_submodule(self._layout.body)
        if positions is not None:
            given |= packed_arguments(positions, body.config._attn_implementation)
        # Only a pass that trains with the built-in loss needs what the routers say.
        balances = labels is not None and self.head_loss is not None and torch.is_grad_enabled()
        with packed_rows() if positions is not None else unpacked_rows():
            output = body(**given, use_cache=False, **self._routing(balances))
        hidden: torch.Tensor = output.last_hidden_state
        if not self.spec.head:
            return hidden
        logits = self._logits_of(output)
        if labels is None or self.head_loss is None:
            return logits(hidden)
        head = self.lm.get_submodule(self._layout.head)
        config: Any = self.lm.config
        loss = self.head_loss(logits, hidden, labels, list(head.parameters()), config.vocab_size)
        if not balances or self._router_factor == 0:
            return loss
        count = (labels >= 0).sum() if self.sums_labels else 1
        return loss + self._router_factor * count * router_loss(self.lm, self._layout, output)

    def _routing(self, recorded: bool) -> dict[str, bool]:
        """Returns the argument that says whether routers' logits are recorded, if there is one."""
        return {"output_router_logits": recorded} if self._router_factor else {}

    def _logits_of(self, output: Any) -> Logits:
        """Returns a function from hidden states [b, l, d] to logits [b, l, V].

        `output` is what the body has returned. The hidden states may be those of a part of its
        tokens, so that the loss can be computed part by part. The function runs the causal LM's own
        forward with a body that returns the given hidden states. So it includes everything that the
        model type does beside its head, such as bias, scale or soft cap.
        """

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            given = copy.copy(output)
            given.last_hidden_state = hidden
            lm = replaced(self.lm, self._layout.body, Given(given))
            # The load-balancing loss is no part of the logits; it would be computed each time.
            found = lm(inputs_embeds=hidden, use_cache=False, **self._routing(False))
            return found.logits  # type: ignore[no-any-return]

        return logits

    def _translate(self, tied: tuple[str, str] | None) -> dict[str, str]:
        prefix = self._layout.layer_prefix
        names: dict[str, str] = {}
        for name in self.lm.state_dict():
            full = name
            if name.startswith(prefix):
                number, dot, rest = name[len(prefix) :].partition(".")
                full = f"{prefix}{int(number) + self.spec.first_layer}{dot}{rest}"
            names[f"lm.{name}"] = stored_name(_unpacked(full)) if self._adapted else full
        if tied is not None and self.spec.embeds and self.spec.head:
            del names[f"lm.{tied[1]}"]
        return names


def _unpacked(name: str) -> str:
    """Returns the name of the weight that a layer in NF4 keeps as `packed`."""
    weight, dot, last = name.rpartition(".")
    return f"{weight}{dot}weight" if last == "packed" else name


class NoPositions(nn.Module):
    """Replaces the learned position embedding in chunks after the first one, which adds it."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Returns a scalar zero; adding it changes no value."""
        return torch.zeros(())


def build_chunk(
    hf_config: PretrainedConfig,
    spec: ChunkSpec,
    *,
    attention: str,
    activation_checkpointing: Checkpointing,
    dtype: torch.dtype = torch.float32,
    adapter: AdapterSection | None = None,
) -> ModelChunk:
    """Build one chunk on the meta device; `materialise` fills it with weights.

    Args:
        hf_config: configuration of the whole model.
        spec: the layers of the chunk.
        attention: name of an attention implementation of transformers.
        activation_checkpointing: what the backward pass recomputes in each layer.
        dtype: data type of the parameters; with adapters, of the frozen ones. Adapters are fp32,
            and so are tensors that the model type keeps in fp32 (`kept_in_fp32`).
        adapter: section `[adapter]` of the run file; None: all parameters are trained.

    Raises:
        ModelError: if the model cannot be built or cut.
        ConfigError: if it cannot have these adapters.
    """
    lm = build_skeleton(hf_config, attention=attention, dtype=dtype)
    if adapter is not None:
        inject(lm, adapter)
    return _cut(lm, find_layout(lm), tied_names(lm), spec, activation_checkpointing, adapter)


def bare_chunks(
    hf_config: PretrainedConfig, cut: Sequence[ChunkSpec], adapter: AdapterSection | None
) -> list[ModelChunk]:
    """Builds all chunks of a model, for names and shapes alone.

    The chunks are parts of one skeleton, and share what is in several of them. They are not run,
    filled or changed. Raises the errors of `build_chunk`.
    """
    # Any attention has the same parameters. This one needs no GPU.
    lm = build_skeleton(hf_config, attention="eager")
    if adapter is not None:
        inject(lm, adapter)
    layout, tied = find_layout(lm), tied_names(lm)
    return [_cut(_twin(lm, layout), layout, tied, spec, False, adapter) for spec in cut]


def _twin(lm: nn.Module, layout: Layout) -> nn.Module:
    """Returns a copy of a model that may be cut: all that `_cut` changes is copied."""
    for path in (layout.body, layout.head.rpartition(".")[0]):
        twin = copy.copy(lm.get_submodule(path))
        twin._modules = dict(twin._modules)
        lm = replaced(lm, path, twin) if path else twin
    return lm


def _cut(
    lm: nn.Module,
    layout: Layout,
    tied: tuple[str, str] | None,
    spec: ChunkSpec,
    activation_checkpointing: Checkpointing,
    adapter: AdapterSection | None,
) -> ModelChunk:
    """Takes away all of a model that is not in a chunk."""
    body = lm.get_submodule(layout.body)
    # Layers keep their number in the whole model, and the whole configuration. Only the body, which
    # loops over the layers, gets the sliced configuration.
    layers = list(body.get_submodule(layout.layers).children())
    kept = layers[spec.first_layer : spec.end_layer]
    setattr(body, layout.layers, nn.ModuleList(kept))
    body.config = sliced_config(body.config, spec.first_layer, spec.end_layer)
    if not spec.embeds:
        setattr(body, layout.embedding, None)
        _pass_through(body, layout.entry)
        if layout.positions is not None:
            setattr(body, layout.positions, NoPositions())
        _undo_input_scale(body)
    if not spec.head:
        _pass_through(body, layout.exit)
        parent, _, name = layout.head.rpartition(".")
        setattr(lm.get_submodule(parent), name, None)
    for layer in kept:
        if adapter is not None and adapter.base == "nf4":
            pack_layers(layer)
        recompute(layer, activation_checkpointing)
    return ModelChunk(lm, spec, layout, tied, adapter is not None)


def sliced_config(config: Any, first_layer: int, end_layer: int) -> Any:
    """Returns a copy of `config` for layers `first_layer` to `end_layer` - 1.

    Lists that have one item per layer are cut to these layers.
    """
    count = config.num_hidden_layers
    part = copy.deepcopy(config)
    part.num_hidden_layers = end_layer - first_layer
    for key, value in vars(config).items():
        if "layer" in key and isinstance(value, list | tuple) and len(value) == count:
            setattr(part, key, value[first_layer:end_layer])
    return part


def _pass_through(body: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        # Some types set a part to None if they do not have it.
        if getattr(body, name) is not None:
            setattr(body, name, nn.Identity())


def _undo_input_scale(body: nn.Module) -> None:
    """Switch off the scaling of the body's input, which Granite models have.

    Hidden states that enter a later chunk have been scaled by the first chunk.
    """
    if hasattr(body, "embedding_multiplier"):
        body.embedding_multiplier = 1.0  # type: ignore[assignment]
