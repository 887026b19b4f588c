"""Where a model is cut: contiguous layers, the largest chunk as small as it can be.

Works on counts only; a 100B model is planned in seconds and without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dilocox.errors import ModelError
from dilocox.models.meta_model import build_skeleton, find_layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ChunkSpec:
    """One chunk of the model: layers `first_layer` up to, not including, `end_layer`.

    `parameters` counts what the chunk holds. A tied head that is in another chunk than the
    embedding is a parameter of its own there, so that the chunks of such a model hold more than
    `count_parameters` by exactly the head.
    """

    index: int
    count: int
    first_layer: int
    end_layer: int
    embeds: bool
    head: bool
    parameters: int
    compute: float = 0.0
    """Multiply-adds per token of its forward pass: matrix products and causal attention."""


@dataclass(frozen=True)
class Weight:
    """Parameters, and multiply-adds per token of the forward pass, of one part of a model."""

    parameters: int
    compute: float

    def __add__(self, other: Weight) -> Weight:
        return Weight(self.parameters + other.parameters, self.compute + other.compute)


def plan_cut(
    hf_config: PretrainedConfig, chunks: int, sequence_length: int
) -> tuple[ChunkSpec, ...]:
    """Cut the model into `chunks` runs of layers, balanced by parameters and compute.

    A chunk's cost is the mean of its share of the parameters (memory and bytes to exchange) and
    its share of the multiply-adds at `sequence_length` tokens (time). The embedding counts to the
    first chunk, final norm and head to the last. The largest cost is the smallest possible; among
    such cuts the most even one is taken.

    Raises `ModelError` if there are fewer layers than chunks, or if the model's learned positions
    end before `sequence_length`.
    """
    model = build_skeleton(hf_config)
    layout = find_layout(model)
    body = model.get_submodule(layout.body)
    layers = list(body.get_submodule(layout.layers).children())
    if chunks > len(layers):
        raise ModelError(
            f"site.stages x site.chunks = {chunks} is above the model's {len(layers)} layers: "
            f"lower them to at most {len(layers)}, or use a deeper model"
        )
    limit = hf_config.max_position_embeddings if layout.positions is not None else sequence_length
    if sequence_length > limit:
        raise ModelError(
            f"data.sequence_length {sequence_length} is above the {limit} positions that the "
            f"model has learned: lower it to at most {limit}"
        )
    weights = [
        _layer_weight(layer, hf_config, i, sequence_length) for i, layer in enumerate(layers)
    ]
    outside = {layout.embedding, layout.positions, *layout.entry}
    entry = sum(_size(getattr(body, name)) for name in outside if name is not None)
    exit_ = sum(_size(getattr(body, name)) for name in layout.exit)
    head = _size(model.get_submodule(layout.head))
    head_compute = float(head)
    if chunks == 1 and model.all_tied_weights_keys:
        head = 0  # held once, with the embedding
    weights[0] += Weight(entry, 0.0)
    weights[-1] += Weight(exit_ + head, head_compute)

    total = Weight(sum(w.parameters for w in weights), sum(w.compute for w in weights))
    costs = [
        0.5 * w.parameters / total.parameters + 0.5 * w.compute / total.compute for w in weights
    ]
    ends = balanced_ends(costs, chunks)
    starts = [0, *ends[:-1]]
    return tuple(
        ChunkSpec(
            index=index,
            count=chunks,
            first_layer=first,
            end_layer=end,
            embeds=index == 0,
            head=index == chunks - 1,
            parameters=sum(w.parameters for w in weights[first:end]),
            compute=sum(w.compute for w in weights[first:end]),
        )
        for index, (first, end) in enumerate(zip(starts, ends, strict=True))
    )


def balanced_ends(costs: Sequence[float], parts: int) -> list[int]:
    """Ends of `parts` contiguous, non-empty runs of `costs`: smallest maximum, then most even.

    Exact dynamic programming in two passes, O(parts * n^2): first the smallest possible maximum,
    then the smallest sum of squares among the cuts that keep it.
    """
    n = len(costs)
    if not 1 <= parts <= n:
        raise ValueError(f"cannot cut {n} items into {parts} non-empty runs")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    infinite = float("inf")
    best = [0.0] + [infinite] * n
    for part in range(1, parts + 1):
        best = [infinite] * part + [
            min(max(best[start], prefix[end] - prefix[start]) for start in range(part - 1, end))
            for end in range(part, n + 1)
        ]
    limit = best[n] * (1 + 1e-12)  # the same cut may round differently on the way back

    squares = [0.0] + [infinite] * n
    chosen: list[list[int]] = []
    for part in range(1, parts + 1):
        after = [infinite] * (n + 1)
        origin = [0] * (n + 1)
        for end in range(part, n + 1):
            for start in range(part - 1, end):
                run = prefix[end] - prefix[start]
                if run <= limit and squares[start] + run * run < after[end]:
                    after[end] = squares[start] + run * run
                    origin[end] = start
        squares = after
        chosen.append(origin)
    ends = [n]
    for origin in reversed(chosen[1:]):
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _size(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _layer_weight(
    layer: nn.Module, config: PretrainedConfig, index: int, sequence_length: int
) -> Weight:
    """A layer's parameters, and its matrix products and attention per token."""
    share = _active_experts(config)
    matmuls = sum(
        p.numel() * (share if ".experts." in f".{name}" else 1.0)
        for name, p in layer.named_parameters()
        if p.dim() >= 2
    )
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    reach = float(sequence_length)
    if kinds is not None and kinds[index] == "sliding_attention" and window:
        reach = min(reach, 2.0 * window)  # of `window` keys all are seen, of a whole row half
    return Weight(_size(layer), matmuls + reach * width)


def _active_experts(config: Any) -> float:
    """Share of a layer's experts that one token passes through."""
    active = getattr(config, "num_experts_per_tok", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, key, None)
        if active and experts:
            return float(min(1.0, active / experts))
    return 1.0
