"""What a forward pass keeps for the backward pass, counted on tensors that have no memory.

The model's own code runs one layer (and the head) on fake tensors, and every tensor that autograd
saves is counted once, parameters left out. So the figures are those of the model that will run,
not of a formula. The loss alone is a formula: most of what it needs is not what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from dilocox.config import RunConfig
from dilocox.memory import activation_bytes
from dilocox.models import ChunkSpec, build_chunk
from dilocox.plan.outline import Outline
from dilocox.site import loss_bytes
from dilocox.site.pipeline import Computation
from dilocox.torch_internals import storage_key, tensors_without_memory


@dataclass(frozen=True)
class Kept:
    """Bytes that one micro-batch keeps at a rank until its backward pass."""

    layer: int
    """Of a layer, all that it saves."""
    entry: int
    """Of a layer, its input alone: what activation checkpointing keeps."""
    head: int
    """Of norm and head, and what the loss needs in its backward pass."""
    exact: bool
    """Counted; otherwise a lower bound, because the model cannot run on fake tensors."""


def kept(config: RunConfig, outline: Outline) -> Kept:
    """What a micro-batch of the run keeps of a layer in the middle, and of the head."""
    bf16 = config.site.precision != "fp32"
    sharded = config.site.shards > 1
    tokens = config.site.micro_batch_size * config.data.sequence_length
    width = 2 if bf16 and sharded else 4
    entry = tokens * int(outline.hf_config.hidden_size) * width
    loss = loss_bytes(tokens * int(outline.hf_config.vocab_size), 2 if bf16 else 4)
    try:
        layer = _saved(config, outline, head=False)
        head = max(0, _saved(config, outline, head=True) - layer)
        return Kept(layer, entry, head + loss, exact=True)
    except Exception:
        # Modelling code may do what fake tensors cannot, such as looking at values.
        site = config.site.model_copy(update={"stages": 1, "schedule": "1f1b"})
        model = config.model.model_copy(update={"activation_checkpointing": False})
        alone = config.model_copy(update={"site": site, "model": model})
        least = activation_bytes(alone, outline.hf_config, 0, 1, False, width)
        return Kept(least, entry, loss, exact=False)


def _saved(config: RunConfig, outline: Outline, head: bool) -> int:
    """Bytes that a chunk of one layer saves for a micro-batch, with the head or without."""
    count = int(outline.hf_config.num_hidden_layers)
    index = count - 1 if head else count // 2
    spec = ChunkSpec(1, 3, index, index + 1, embeds=False, head=head, parameters=0)
    rows, length = config.site.micro_batch_size, config.data.sequence_length
    bf16 = config.site.precision != "fp32"
    sharded = config.site.shards > 1
    attention = "eager" if config.model.attention == "eager" else "sdpa"
    # Under FSDP parameters are used as bf16; otherwise autocast casts them for each product.
    chunk = build_chunk(
        outline.hf_config,
        spec,
        attention=attention,
        activation_checkpointing=False,
        dtype=torch.bfloat16 if bf16 and sharded else torch.float32,
    )
    chunk.train()
    with _one_sequence_per_row(), tensors_without_memory():
        chunk.to_empty(device="cpu")
        inputs = torch.empty(
            rows,
            length,
            int(outline.hf_config.hidden_size),
            dtype=torch.bfloat16 if bf16 and sharded else torch.float32,
            requires_grad=True,
        )

        computes = Computation(
            torch.device("cpu"), torch.bfloat16 if bf16 else torch.float32, sharded
        )
        computes.prepare(chunk)

        def forward() -> Any:
            with computes.step(), computes.forward():
                return chunk(inputs)

        saved = _count_saved(forward, chunk)
    # Each matrix is cast once for all micro-batches, and its products save the cast.
    matrices = sum(p.numel() for p in chunk.parameters() if p.dim() > 1)
    return saved - (2 * matrices if bf16 and not sharded else 0)


@contextmanager
def _one_sequence_per_row() -> Iterator[None]:
    """Tell transformers what it sees by itself from real tensors: rows are not packed sequences.

    Of fake tensors it cannot know, and would build masks that no run of ours has.
    """
    name = "find_packed_sequence_indices"
    known = getattr(masking_utils, name, None)
    if known is None:
        yield
        return
    setattr(masking_utils, name, lambda _positions: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, known)


def _count_saved(forward: Callable[[], Any], module: torch.nn.Module) -> int:
    """Bytes of all storages that autograd saves in `forward`, parameters of `module` left out."""
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
