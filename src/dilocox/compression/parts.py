"""What of a flat buffer is encoded how: tensors cut into segments, segments into one payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dilocox.compression.base import BLOCK, Codec, check_payload, check_values, output
from dilocox.compression.geometry import Geometry
from dilocox.errors import ExchangeError

SMALLEST_SPARSE = 4096
"""Tensors with fewer values than this, or with one dimension, are not thinned out."""


@dataclass(frozen=True)
class Segment:
    """Values [start, end) of a part, encoded by one codec."""

    codec: Codec
    start: int
    end: int

    @property
    def payload_bytes(self) -> int:
        """Exact payload size of the segment."""
        return self.codec.payload_bytes(self.end - self.start)


@dataclass(frozen=True)
class Part:
    """Some values of the buffer and how they are encoded.

    The payload is that of its segments, one after another.
    """

    name: str
    """Canonical spec."""
    identifier: int
    """Number in the frame header."""
    values: int
    """Number of values; a multiple of 128."""
    segments: tuple[Segment, ...]
    """In order, covering all values; none is empty."""
    gaps: tuple[tuple[int, int], ...]
    """[start, end) of what belongs to no tensor: zero after decoding."""

    @cached_property
    def payload_bytes(self) -> int:
        """Exact size of the payload."""
        return sum(segment.payload_bytes for segment in self.segments)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Flat contiguous finite fp32 [values] to uint8 [payload_bytes] on the same device.

        The result is `out` if given. Raises `ExchangeError` for values of another number or type.
        """
        if check_values(values) != self.values:
            raise ExchangeError(
                f"{self.name}: a part of {self.values} values was given {values.numel()}"
            )
        if len(self.segments) == 1:
            return self.segments[0].codec.encode(values, out)
        payload = output(out, self.payload_bytes, torch.uint8, values.device)
        first = 0
        for each in self.segments:
            last = first + each.payload_bytes
            # Segments do not begin where a codec could write its scales.
            payload[first:last].copy_(each.codec.encode(values[each.start : each.end]))
            first = last
        return payload

    def decode(self, payload: Tensor, out: Tensor | None = None) -> Tensor:
        """uint8 [payload_bytes] to finite fp32 [values] on the same device, into `out` if given.

        Raises `ExchangeError` if the payload has another size or is none that encoding makes.
        """
        payload = check_payload(payload, self.payload_bytes, self.name, self.values)
        values = output(out, self.values, torch.float32, payload.device)
        first = 0
        for each in self.segments:
            last = first + each.payload_bytes
            room = values[each.start : each.end]
            each.codec.decode(payload[first:last], each.end - each.start, out=room)
            first = last
        for start, end in self.gaps:
            values[start:end] = 0
        return values


@dataclass(frozen=True)
class Compressor:
    """A codec for the parts of a buffer, each encoded on its own in a single phase."""

    name: str
    """Canonical spec."""
    identifier: int
    """Number in the frame header."""
    geometry: Geometry
    dense: Codec
    """For all values, or for those of small and 1-D tensors if there is `sparse`."""
    sparse: Callable[[int, int], Codec] | None = None
    """The codec of the other tensors, for a seed and the segment's place in the buffer."""

    def part(self, start: int, end: int, seed: int = 0) -> Part:
        """Values [start, end) of the buffer, multiples of 128, as a part.

        `seed` must be the same at all sites; only `cocktail` draws from it. Raises
        `ExchangeError` for limits that are not in the buffer.
        """
        if start % BLOCK or end % BLOCK or not 0 <= start <= end <= self.geometry.length:
            raise ExchangeError(
                f"values {start} to {end} are no part of a buffer of {self.geometry.length} in "
                f"blocks of {BLOCK}"
            )
        gaps = _clipped(self.geometry.gaps(), start, end)
        segments = tuple(self._segments(start, end, seed))
        return Part(self.name, self.identifier, end - start, segments, tuple(gaps))

    def _segments(self, start: int, end: int, seed: int) -> list[Segment]:
        if self.sparse is None:
            return [Segment(self.dense, 0, end - start)] if end > start else []
        segments: list[Segment] = []
        for (low, high), thin in zip(*self._spans(), strict=True):
            for first, last in _clipped([(low, high)], start, end):
                if not thin and segments and segments[-1].codec is self.dense:
                    # Blocks do not know their neighbours: small tensors share a segment.
                    segments[-1] = Segment(self.dense, segments[-1].start, last)
                    continue
                codec = self.sparse(seed, start + first) if thin else self.dense
                segments.append(Segment(codec, first, last))
        return segments

    def _spans(self) -> tuple[list[tuple[int, int]], list[bool]]:
        """[start, end) of the tensors with the gaps behind them, and which are thinned out."""
        shapes, offsets = self.geometry.shapes, self.geometry.offsets
        # What lies before the first tensor, if anything, is a gap like the others.
        starts, ends = (0, *offsets), (*offsets, self.geometry.length)
        thin = [False] + [
            len(shape) > 1 and self.geometry.size(number) >= SMALLEST_SPARSE
            for number, shape in enumerate(shapes)
        ]
        return list(zip(starts, ends, strict=True)), thin


def _clipped(intervals: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What of `intervals` lies in [start, end), counted from `start`; empty ones are left out."""
    cut = [(max(low, start) - start, min(high, end) - start) for low, high in intervals]
    return [(low, high) for low, high in cut if low < high]
