"""Counts the activations that a forward pass saves for the backward pass, on fake tensors.

The model's own code runs one layer, and the head, on tensors without memory. Every tensor that
autograd saves is counted once; parameters are left out. The figures are therefore those of the
model itself, not of a formula. Only the loss is estimated by a formula, because autograd saves
only a small part of the memory that the loss needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dilocox.config.run_config import RunConfig
from dilocox.inner.head_loss import head_tokens
from dilocox.inner.memory import activation_bytes, holds_whole_logits, logits_bytes
from dilocox.models import ChunkSpec, build_chunk
from dilocox.models.activation_checkpointing import SelectedBytes
from dilocox.models.chunk import HeadLoss, Logits
from dilocox.models.nf4 import Nf4Linear
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.utils.torch_internals import storage_key, tensors_without_memory


@dataclass(frozen=True)
class Kept:
    """Bytes that one micro-batch keeps at a rank until its backward pass."""

    layer: int
    """All activations that one layer saves."""
    entry: int
    """The input of one layer, which `activation_checkpointing = true` keeps."""
    selected: int
    """Bytes that one layer keeps with `activation_checkpointing = "selective"`."""
    head: int
    """Bytes that final norm and head save, and bytes of the loss in its backward pass."""
    exact: bool
    """True if activations were counted. Otherwise a formula gave a lower bound, because the model's
    code does not run on fake tensors."""


def kept(config: RunConfig, outline: ModelOutline) -> Kept:
    """Return the bytes that one micro-batch of the run keeps of a middle layer and of the head."""
    tokens = config.site.micro_batch_size * config.data.sequence_length
    width = config.site.value_bytes
    hidden = int(outline.hf_config.hidden_size)
    entry = tokens * hidden * width
    device = "cpu" if config.site.device == "cpu" else "cuda"
    loss = logits_bytes(config, outline.hf_config, width, device)
    try:
        layer, selected = _saved(config, outline)
        before, _ = _saved(config, outline, _hidden_alone)
        # Bytes that the head saves of its logits, for example for a soft cap. They count for the
        # tokens that the head processes at a time.
        of_logits = _saved(config, outline, _all_logits)[0] - before
        if not holds_whole_logits(config):
            vocabulary = int(outline.hf_config.vocab_size)
            of_logits = of_logits * head_tokens(tokens, vocabulary, hidden, device) // tokens
        head = max(0, before - layer) + of_logits
        return Kept(layer, entry, min(layer, entry + selected), head + loss, exact=True)
    except Exception:
        # Modelling code may do things that fake tensors do not support, such as reading values.
        site = config.site.model_copy(update={"stages": 1, "schedule": "1f1b"})
        model = config.model.model_copy(update={"activation_checkpointing": False})
        alone = config.model_copy(update={"site": site, "model": model})
        least = activation_bytes(alone, outline.hf_config, 0, 1, False, width)
        return Kept(least, entry, min(least, 2 * entry), loss, exact=False)


def _all_logits(logits: Logits, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stand-in for a loss: returns the logits of all tokens."""
    return logits(hidden)


def _hidden_alone(_logits: Logits, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stand-in for a loss: saves its input, as a matrix product does."""
    return hidden.square()


def _saved(
    config: RunConfig, outline: ModelOutline, loss: HeadLoss | None = None
) -> tuple[int, int]:
    """Return (bytes that a chunk of one layer saves for a micro-batch, bytes of the outputs that
    selective checkpointing saves). With a `loss` the chunk includes the head."""
    head = loss is not None
    count = int(outline.hf_config.num_hidden_layers)
    index = count - 1 if head else count // 2
    spec = ChunkSpec(1, 3, index, index + 1, embeds=False, head=head, parameters=0)
    rows, length = config.site.micro_batch_size, config.data.sequence_length
    attention = "eager" if config.model.attention == "eager" else "sdpa"
    # A run in bf16 computes with bf16 parameters: FSDP's gathered ones, or casts.
    dtype = torch.bfloat16 if config.site.precision != "fp32" else torch.float32
    chunk = build_chunk(
        outline.hf_config,
        spec,
        attention=attention,
        activation_checkpointing=False,
        dtype=dtype,
        adapter=outline.blueprint.adapter,
    )
    chunk.to(dtype).train()
    chunk.head_loss = loss
    with tensors_without_memory():
        chunk.to_empty(device="cpu")
        for module in chunk.modules():
            if isinstance(module, Nf4Linear):
                module.leave_blank()
        hidden = int(outline.hf_config.hidden_size)
        inputs = torch.empty(rows, length, hidden, dtype=dtype, requires_grad=True)
        selected = SelectedBytes()
        numbers = torch.empty(rows, length, dtype=torch.int64)
        # Documents that do not see each other need a mask [rows, 1, length, length].
        positions = numbers if config.data.rows.packing == "documents" else None

        def forward() -> Any:
            with selected:
                return chunk(inputs, numbers, positions)

        return _count_saved(forward, chunk), selected.total


def _count_saved(forward: Callable[[], Any], module: torch.nn.Module) -> int:
    """Return the bytes of all storages that autograd saves in `forward`, without parameters of
    `module`."""
    own = {storage_key(parameter) for parameter in module.parameters()}
    found: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key not in own:
            found[key] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # so that no other storage gets the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(forward())
    return sum(found.values())
