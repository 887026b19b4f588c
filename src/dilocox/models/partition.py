"""Decides where a model is cut into chunks of contiguous layers.

The largest chunk is made as small as possible. The module only counts, so that a model of 100B
parameters is planned in seconds and without memory for weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dilocox.config.adapter import AdapterSection
from dilocox.errors import ConfigError, ModelError
from dilocox.models.adapter import inject
from dilocox.models.meta_model import build_skeleton, find_layout, skeleton_to_read
from dilocox.models.nf4 import linear_layers, nf4_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ChunkSpec:
    """One chunk of the model: layers `first_layer` up to, but not including, `end_layer`."""

    index: int
    """Number of the chunk, from 0."""
    count: int
    """Number of chunks of the model."""
    first_layer: int
    end_layer: int
    embeds: bool
    """Whether the chunk has the token embedding."""
    head: bool
    """Whether the chunk has the output projection."""
    parameters: int
    """Number of parameters in the chunk. A tied head in another chunk than the embedding counts
    again, so that all chunks together have `count_parameters` plus the size of the head."""
    compute: float = 0.0
    """Multiply-adds per token of the forward pass: matrix products and causal attention, without
    adapters."""
    adapters: int | None = None
    """Number of parameters of the chunk's adapters, which `parameters` does not include. None: the
    run has no adapters, and all parameters are trained."""
    fixed: int = 0
    """Number of further parameters of the chunk's adapters, which keep their first values."""
    packed: int = 0
    """Number of parameters that are kept in NF4. `parameters` includes them."""

    @property
    def trained(self) -> int:
        """Number of parameters that the run trains."""
        return self.parameters if self.adapters is None else self.adapters

    def frozen_bytes(self, width: int) -> int:
        """Return the bytes of the parameters that the run only reads and that shards divide.

        Those in NF4 are left out. `width`: bytes of the compute dtype.
        """
        return width * (self.frozen - self.packed)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the parameters that are kept in NF4. Every shard and replica holds them all."""
        return nf4_bytes(self.packed)

    @property
    def frozen(self) -> int:
        """Number of parameters that the run only reads."""
        return 0 if self.adapters is None else self.parameters + self.fixed


@dataclass(frozen=True)
class Weight:
    """Size of one part of a model: parameters, and forward multiply-adds per token."""

    parameters: int
    compute: float

    def __add__(self, other: Weight) -> Weight:
        return Weight(self.parameters + other.parameters, self.compute + other.compute)


def plan_cut(
    hf_config: PretrainedConfig,
    chunks: int,
    sequence_length: int,
    adapter: AdapterSection | None = None,
) -> tuple[ChunkSpec, ...]:
    """Cut the model into `chunks` chunks of contiguous layers, balanced by parameters and compute.

    The cost of a chunk is the mean of two fractions. Its fraction of the parameters stands for
    memory and bytes to exchange. Its fraction of the multiply-adds at `sequence_length` tokens
    stands for time. The embedding belongs to the first chunk; final norm and head belong to the
    last. The cut has the smallest possible largest cost. Among such cuts, the most
    even one is chosen. Adapters (`adapter`) do not change the cut.

    Raises `ModelError` if there are fewer layers than chunks, or if the model has fewer learned
    positions than `sequence_length`. Raises `ConfigError` if the model cannot have the adapters, or
    if a chunk would have none.
    """
    # Adapters are added to it.
    model = skeleton_to_read(hf_config) if adapter is None else build_skeleton(hf_config)
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
        head = 0  # it is the same parameter as the embedding, which is counted already
    weights[0] += Weight(entry, 0.0)
    weights[-1] += Weight(exit_ + head, head_compute)

    total = Weight(sum(w.parameters for w in weights), sum(w.compute for w in weights))
    costs = [
        0.5 * w.parameters / total.parameters + 0.5 * w.compute / total.compute for w in weights
    ]
    ends = balanced_ends(costs, chunks)
    starts = [0, *ends[:-1]]
    packed = None if adapter is None or adapter.base == "full" else _packed_sizes(model, layers)
    sizes = None if adapter is None else _adapter_sizes(model, layers, starts, ends, adapter)
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
            adapters=None if sizes is None else sizes[index][0],
            fixed=0 if sizes is None else sizes[index][1],
            packed=0 if packed is None else sum(packed[first:end]),
        )
        for index, (first, end) in enumerate(zip(starts, ends, strict=True))
    )


def _packed_sizes(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Return how many parameters of each layer are kept in NF4.

    Raises `ConfigError` if a layer has none.
    """
    sizes = [sum(each.weight.numel() for _, each in linear_layers(layer)) for layer in layers]
    if 0 in sizes:
        raise ConfigError(
            f'adapter.base = "nf4": layer {sizes.index(0)} of {type(model).__name__} has no layer '
            'of torch.nn.Linear, and no others can be kept in four bits: set adapter.base = "full"'
        )
    return sizes


def _adapter_sizes(
    model: nn.Module,
    layers: Sequence[nn.Module],
    starts: Sequence[int],
    ends: Sequence[int],
    adapter: AdapterSection,
) -> list[tuple[int, int]]:
    """Add adapters to the model, and return how many parameters of them each chunk has.

    A pair has the trained ones, and those that keep their first values.
    """
    before = [_size(layer) for layer in layers]
    inject(model, adapter)
    own = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
    fixed = [_size(layer) - b - o for layer, b, o in zip(layers, before, own, strict=True)]
    sizes = [(sum(own[a:b]), sum(fixed[a:b])) for a, b in zip(starts, ends, strict=True)]
    empty = [index for index, (trained, _) in enumerate(sizes) if not trained]
    if empty:
        at = empty[0]
        raise ConfigError(
            f"adapter.targets: layers {starts[at]} to {ends[at] - 1} would have no adapter, so "
            "their stage would train nothing; choose names that more layers have"
        )
    return sizes


def balanced_ends(costs: Sequence[float], parts: int) -> list[int]:
    """Divide `costs` into `parts` contiguous, non-empty runs, and return the ends of the runs.

    The division has the smallest possible maximum cost of a run, and among such divisions the
    smallest sum of squares. Two passes of exact dynamic programming find it in O(parts * n^2).
    Raises `ValueError` if there are fewer costs than parts.
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
    limit = best[n] * (1 + 1e-12)  # the second pass may round the same cut differently

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
    """Returns a layer's parameters, and its multiply-adds per token of products and attention."""
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
        # A token attends to all keys of its window, but on average to half the keys of a row.
        reach = min(reach, 2.0 * window)
    return Weight(_size(layer), matmuls + reach * width)


def _active_experts(config: Any) -> float:
    """Returns the fraction of a layer's experts that process one token; 1.0 without experts."""
    active = getattr(config, "num_experts_per_tok", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, key, None)
        if active and experts:
            return float(min(1.0, active / experts))
    return 1.0
