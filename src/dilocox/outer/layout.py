"""Pieces: the tensors that always travel together, and their places in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression import BLOCK, Geometry
from dilocox.errors import ConfigError, ExchangeError
from dilocox.outer.staging import Staging, staging_of


@dataclass(frozen=True)
class Layout:
    """Place of each tensor of one or several pieces in a flat fp32 buffer.

    Every tensor starts at a multiple of 128 values, so that no quantisation block mixes two
    tensors. The gaps between tensors are zero and stay zero. A tensor may have no elements, because
    FSDP shards are uneven; so may the whole buffer.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    length: int
    """Values in the buffer; a multiple of 128."""

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """Return the layout of tensors with these local shapes, by full name, in this order."""
        offsets = []
        length = 0
        for shape in shapes.values():
            offsets.append(length)
            length += -(-math.prod(shape) // BLOCK) * BLOCK
        plain = tuple(tuple(int(size) for size in shape) for shape in shapes.values())
        return cls(tuple(shapes), plain, tuple(offsets), length)

    @classmethod
    def joined(cls, layouts: Sequence[Layout]) -> Layout:
        """Return the layout of several buffers that are concatenated."""
        if len(layouts) == 1:
            return layouts[0]
        offsets: list[int] = []
        length = 0
        for each in layouts:
            offsets += [length + offset for offset in each.offsets]
            length += each.length
        names = tuple(name for each in layouts for name in each.names)
        shapes = tuple(shape for each in layouts for shape in each.shapes)
        return cls(names, shapes, tuple(offsets), length)

    @property
    def geometry(self) -> Geometry:
        """The layout in the form that codecs take."""
        return Geometry(self.shapes, self.offsets, self.length)

    @property
    def gaps(self) -> list[slice]:
        """Slices of the buffer that belong to no tensor."""
        ends = [o + math.prod(shape) for o, shape in zip(self.offsets, self.shapes, strict=True)]
        begins = [*self.offsets[1:], self.length]
        return [slice(end, begin) for end, begin in zip(ends, begins, strict=False) if end < begin]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each tensor by full name, as a view of `flat` [length] in the tensor's shape.

        Raises `ExchangeError` if `flat` has another length.
        """
        if flat.shape != (self.length,):
            raise ExchangeError(
                f"a layout of {self.length} values does not fit a tensor {list(flat.shape)}"
            )
        return {
            name: flat[offset : offset + math.prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def pack(
        self,
        tensors: Mapping[str, Tensor],
        out: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Copy `tensors` into a flat fp32 [length] tensor and return it. Complete on return.

        Args:
            tensors: at least the layout's tensors by full name, fp32, on any device.
            out: the target, whose gaps must be zero already. None allocates a new tensor.
            device: device of a new tensor; None means the CPU. Tensors of a GPU are then packed
                into pinned host memory.

        Raises `ExchangeError` if a tensor is missing or has another shape or dtype.
        """
        self._check(tensors)
        staging = _between(device if out is None else out.device, tensors, self.names)
        if out is not None:
            flat = out
        elif device is None or device.type == "cpu":
            flat = staging.empty(self.length, torch.float32)
        else:
            flat = torch.empty(self.length, device=device)
        if out is None:
            for gap in self.gaps:
                flat[gap] = 0
        staging.copy([(view, tensors[name].detach()) for name, view in self.views(flat).items()])
        return flat

    def unpack(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy `flat` [length] into `tensors` in place. Complete on return.

        Raises `ExchangeError` if a tensor is missing or has another shape or dtype.
        """
        self._check(tensors)
        with torch.no_grad():
            staging = _between(flat.device, tensors, self.names)
            staging.copy([(tensors[name], view) for name, view in self.views(flat).items()])

    def locate(self, position: int) -> str:
        """Return `name[index]` of the value at `position` of the buffer, for messages."""
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            if offset <= position < offset + math.prod(shape):
                return f"{name}[{position - offset}]"
        return f"padding[{position}]"

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = tensors.get(name)
            if tensor is None:
                raise ExchangeError(f"{name}: belongs to this fragment but was not given")
            if tensor.shape != shape or tensor.dtype != torch.float32:
                raise ExchangeError(
                    f"{name}: expected fp32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )


def _between(
    flat: torch.device | None, tensors: Mapping[str, Tensor], names: Sequence[str]
) -> Staging:
    """Return the staging that copies between a buffer on device `flat` and `names` of `tensors`.

    The GPU's staging if the tensors are on a GPU and the buffer is in host memory; else the CPU's.
    """
    devices = {tensors[name].device for name in names}
    elsewhere = [device for device in devices if device.type != "cpu"]
    if elsewhere and (flat is None or flat.type == "cpu"):
        return staging_of(elsewhere[0])
    return staging_of(torch.device("cpu"))


def local_shapes(
    shapes: Mapping[str, Sequence[int]], names: Sequence[str], shard: int, shards: int
) -> dict[str, tuple[int, ...]]:
    """Return the local shapes, by name, of `names` at shard `shard` of `shards`.

    `shapes` are the shapes of whole tensors. As in FSDP, each shard holds ceil(rows / shards)
    consecutive rows; the last shards hold fewer rows, or none.
    """
    local = {}
    for name in names:
        rows, *rest = shapes[name]
        run = -(-rows // shards)
        local[name] = (max(0, min(run, rows - shard * run)), *rest)
    return local


def layer_number(name: str) -> int | None:
    """Return the first whole number among the dotted parts of a parameter's name, or None."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def split_pieces(
    sizes: Mapping[str, int],
    fragments: int,
    layer_of: Callable[[str], int | None] = layer_number,
) -> list[list[str]]:
    """Split tensor names into `fragments` contiguous pieces, as equal in size as layers allow.

    The tensors of a layer stay in one piece. Consecutive tensors without a layer number (the
    embedding; the final norm and the head) count as one layer. With fewer layers than pieces,
    layers are split between their tensors.

    Args:
        sizes: number of elements of each whole (unsharded) tensor, in model order, so that all
            shards of a stage split alike.
        fragments: number of pieces (`outer.fragments`).
        layer_of: layer number of a tensor name, or None.

    Raises `ConfigError` if there are fewer tensors than pieces.
    """
    units: list[list[str]] = []
    last: int | None = None
    for name in sizes:
        layer = layer_of(name)
        if not units or layer != last:
            units.append([])
        units[-1].append(name)
        last = layer
    if len(units) < fragments:
        units = [[name] for name in sizes]
    if not 1 <= fragments <= len(units):
        raise ConfigError(
            f"outer.fragments: a stage of {len(units)} tensors cannot be split into {fragments}; "
            "lower outer.fragments or site.stages"
        )
    weights = [sum(sizes[name] for name in unit) for unit in units]
    ends = _partition(weights, fragments)
    starts = [0, *ends[:-1]]
    return [
        [name for unit in units[start:end] for name in unit]
        for start, end in zip(starts, ends, strict=True)
    ]


def _partition(weights: Sequence[int], parts: int) -> list[int]:
    """Return the ends of `parts` non-empty groups of consecutive `weights`, balanced by weight.

    The sum of the squared group weights is the smallest possible. Whole numbers and a fixed order
    of comparison give every rank the same result.
    """
    count = len(weights)
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    # best[end]: lowest cost of weights[:end] in the groups so far. choice[end]: start of the
    # last group.
    best: list[int | None] = [0] + [None] * count
    choices: list[list[int]] = []
    for part in range(1, parts + 1):
        costs: list[int | None] = [None] * (count + 1)
        choice = [0] * (count + 1)
        for end in range(part, count + 1):
            for start in range(part - 1, end):
                cost = best[start]
                if cost is None:
                    continue
                cost += (before[end] - before[start]) ** 2
                known = costs[end]
                if known is None or cost < known:
                    costs[end], choice[end] = cost, start
        best = costs
        choices.append(choice)
    ends = [count]
    for choice in reversed(choices[1:]):
        ends.append(choice[ends[-1]])
    return ends[::-1]
