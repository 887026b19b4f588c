"""One chunk: the model's own code with the layers of all other chunks taken out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilocox.models.activation_checkpointing import Checkpointing, recompute
from dilocox.models.meta_model import Layout, build_skeleton, find_layout, tied_names
from dilocox.models.partition import ChunkSpec
from dilocox.models.unpacked_rows import unpacked_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [b, l, d] -> logits [b, l, V]."""
HeadLoss = Callable[[Logits, torch.Tensor, torch.Tensor, list[torch.Tensor], int], torch.Tensor]
"""(logits, hidden states [b, l, d], labels int64 [b, l], the head's parameters, V) -> scalar."""


class ModelChunk(nn.Module):
    """A run of a causal LM's layers, usable as the module of a pipeline stage.

    `forward` takes token ids (int64 [B, L]) if the chunk embeds, else hidden states [B, L, d]. It
    gives logits [B, L, V] if the chunk has the head, else hidden states [B, L, d]. Every token
    attends to all tokens before it in its row; there is no padding mask.

    With a `head_loss` set, a chunk that has the head and is given `labels` (int64 [B, L]) gives
    the loss, a scalar, instead of logits. Other chunks do not look at labels.
    """

    head_loss: HeadLoss | None = None
    """Computes the loss from hidden states; None if the chunk is asked for logits alone."""

    def __init__(
        self, lm: nn.Module, spec: ChunkSpec, layout: Layout, tied: tuple[str, str] | None
    ):
        super().__init__()
        self.lm = lm
        self.spec = spec
        self._layout = layout
        self._names = self._translate(tied)

    @property
    def layers(self) -> list[nn.Module]:
        """The chunk's layers, first to last (for FSDP wrapping)."""
        body = self.lm.get_submodule(self._layout.body)
        return list(body.get_submodule(self._layout.layers).children())

    @property
    def embedding(self) -> nn.Module | None:
        """The token embedding, if this chunk embeds (for FSDP wrapping)."""
        if not self.spec.embeds:
            return None
        return self.lm.get_submodule(f"{self._layout.body}.{self._layout.embedding}")

    @property
    def closing(self) -> list[nn.Module]:
        """What comes after the last layer, in order of use, the head last (for FSDP wrapping).

        Empty unless this chunk has the head and a module before it, which every forward pass calls.
        """
        body = self.lm.get_submodule(self._layout.body)
        before = [getattr(body, name) for name in self._layout.exit] if self.spec.head else []
        before = [module for module in before if module is not None]
        return [*before, self.lm.get_submodule(self._layout.head)] if before else []

    def full_names(self) -> dict[str, str]:
        """Local name -> name in the whole model's state dict, of parameters and saved buffers.

        A tied head beside its embedding is left out: it is the embedding's parameter. A tied head
        in another chunk has the head's own name.
        """
        return dict(self._names)

    def full_name(self, local_name: str) -> str:
        """The whole model's name of one parameter or saved buffer. Raises `KeyError`."""
        return self._names[local_name]

    def saved_buffers(self) -> dict[str, torch.Tensor]:
        """The whole model's name -> buffer, of those that its state dict has."""
        return {
            self._names[name]: buffer
            for name, buffer in self.named_buffers()
            if name in self._names
        }

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Run the chunk; see the class for shapes."""
        given = {"input_ids": x} if self.spec.embeds else {"inputs_embeds": x}
        with unpacked_rows():
            output = self.lm.get_submodule(self._layout.body)(**given, use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state
        if not self.spec.head:
            return hidden
        logits = self._logits_of(output)
        if labels is None or self.head_loss is None:
            return logits(hidden)
        head = self.lm.get_submodule(self._layout.head)
        config: Any = self.lm.config
        return self.head_loss(logits, hidden, labels, list(head.parameters()), config.vocab_size)

    def _logits_of(self, output: Any) -> Logits:
        """Hidden states [b, l, d] -> logits [b, l, V], of any of the tokens that the body gave
        `output` for.

        It is the causal LM's own forward, with a body that gives these hidden states. So whatever
        the model's type does beside its head (bias, scale, soft cap) is done here, too.
        """

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            given = copy.copy(output)
            given.last_hidden_state = hidden
            lm = _replaced(self.lm, self._layout.body, _Given(given))
            found: torch.Tensor = lm(inputs_embeds=hidden, use_cache=False).logits
            return found

        return logits

    def _translate(self, tied: tuple[str, str] | None) -> dict[str, str]:
        prefix = self._layout.layer_prefix
        names: dict[str, str] = {}
        for name in self.lm.state_dict():
            full = name
            if name.startswith(prefix):
                number, dot, rest = name[len(prefix) :].partition(".")
                full = f"{prefix}{int(number) + self.spec.first_layer}{dot}{rest}"
            names[f"lm.{name}"] = full
        if tied is not None and self.spec.embeds and self.spec.head:
            del names[f"lm.{tied[1]}"]
        return names


class _Given(nn.Module):
    """Stands for a body that has run."""

    def __init__(self, output: Any):
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        """What the body gave."""
        return self._output


def _replaced(module: nn.Module, path: str, other: nn.Module) -> nn.Module:
    """`module` with `other` at `path`; everything else is shared with `module`, which stays."""
    name, _, rest = path.partition(".")
    twin = copy.copy(module)
    inner = _replaced(module.get_submodule(name), rest, other) if rest else other
    twin._modules = {**module._modules, name: inner}
    return twin


class NoPositions(nn.Module):
    """Stands for a learned position embedding after the first chunk, where it was added already."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """A scalar zero; adding it changes no value."""
        return torch.zeros(())


def build_chunk(
    hf_config: PretrainedConfig,
    spec: ChunkSpec,
    *,
    attention: str,
    activation_checkpointing: Checkpointing,
    dtype: torch.dtype = torch.float32,
) -> ModelChunk:
    """Build one chunk on the meta device; `materialise` fills it.

    `attention` is an attention implementation of transformers. With `activation_checkpointing`
    each layer is computed again in the backward pass, wholly or in part.

    Raises `ModelError` if the model cannot be built or cut.
    """
    lm = build_skeleton(hf_config, attention=attention, dtype=dtype)
    layout = find_layout(lm)
    tied = tied_names(lm)
    body = lm.get_submodule(layout.body)
    # Layers keep the number they were built with and the whole configuration; only the loop over
    # them sees the sliced one.
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
        recompute(layer, activation_checkpointing)
    return ModelChunk(lm, spec, layout, tied)


def sliced_config(config: Any, first_layer: int, end_layer: int) -> Any:
    """A copy of `config` for layers `first_layer` up to `end_layer`: per-layer lists are cut."""
    count = config.num_hidden_layers
    part = copy.deepcopy(config)
    part.num_hidden_layers = end_layer - first_layer
    for key, value in vars(config).items():
        if "layer" in key and isinstance(value, list | tuple) and len(value) == count:
            setattr(part, key, value[first_layer:end_layer])
    return part


def _pass_through(body: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        # None is how some types say that they have no such part.
        if getattr(body, name) is not None:
            setattr(body, name, nn.Identity())


def _undo_input_scale(body: nn.Module) -> None:
    """Granite's body multiplies its input; hidden states of a later chunk are scaled already."""
    if hasattr(body, "embedding_multiplier"):
        body.embedding_multiplier = 1.0  # type: ignore[assignment]
