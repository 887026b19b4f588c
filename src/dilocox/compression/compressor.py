"""Parts of a flat buffer of tensors, each encoded on its own by one codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dilocox.compression.base import BLOCK, Codec, check_values
from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.second_moments import WithMoments, due_rows
from dilocox.errors import ExchangeError


@dataclass(frozen=True)
class Part:
    """Some values of the buffer and how they are encoded: as one run, whatever tensors they are."""

    name: str
    """Canonical spec."""
    identifier: int
    """Number in the frame header."""
    values: int
    """Number of values; a multiple of 128."""
    codec: Codec
    gaps: tuple[tuple[int, int], ...]
    """[start, end) of what belongs to no tensor: zero after decoding."""

    @property
    def numbers(self) -> tuple[int, int]:
        """The codec's own numbers, in the frame header."""
        return self.codec.numbers

    @cached_property
    def payload_bytes(self) -> int:
        """Exact size of the payload."""
        return self.codec.payload_bytes(self.values)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Flat contiguous finite fp32 [values] to uint8 [payload_bytes] on the same device.

        The result is `out` if given. Raises `ExchangeError` for values of another number or type.
        """
        if check_values(values) != self.values:
            raise ExchangeError(
                f"{self.name}: a part of {self.values} values was given {values.numel()}"
            )
        return self.codec.encode(values, out)

    def decode(self, payload: Tensor, out: Tensor | None = None) -> Tensor:
        """uint8 [payload_bytes] to finite fp32 [values] on the same device, into `out` if given.

        Raises `ExchangeError` if the payload has another size or is none that encoding makes.
        """
        values = self.codec.decode(payload, self.values, out)
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
    codec: Callable[[int, int], Codec]
    """What encodes a part, by seed and the part's place in the buffer."""
    moments: Tensor | None = None
    """uint8 [due_rows] that travel behind payloads, if any do."""

    def with_moments(self) -> Compressor:
        """The same with moments behind its payloads, which are zeros until `carrying` sets them."""
        zeros = torch.zeros(due_rows(self.geometry), dtype=torch.uint8)
        one = WithMoments(self.codec(0, 0), zeros)
        return replace(self, name=one.name, identifier=one.identifier, moments=zeros)

    def carrying(self, moments: Tensor) -> Compressor:
        """The same with these moments, uint8 [due_rows], behind its payloads instead of its own.

        Raises `ExchangeError` for others, and for a codec that carries none.
        """
        own = self.moments
        if own is None or moments.dtype != torch.uint8 or moments.shape != own.shape:
            due = "none" if own is None else f"uint8 {list(own.shape)}"
            raise ExchangeError(
                f"{self.name}: carries {due} of moments, got {moments.dtype} {list(moments.shape)}"
            )
        return replace(self, moments=moments)

    def part(self, start: int, end: int, seed: int = 0) -> Part:
        """Values [start, end) of the buffer, multiples of 128, as a part.

        `seed` must be the same at all sites; only `cocktail` draws from it. Raises
        `ExchangeError` for limits that are not in the buffer.
        """
        if self.moments is not None and (start, end) != (0, self.geometry.length):
            raise ExchangeError(f"{self.name}: moments travel with whole buffers, not with parts")
        if start % BLOCK or end % BLOCK or not 0 <= start <= end <= self.geometry.length:
            raise ExchangeError(
                f"values {start} to {end} are no part of a buffer of {self.geometry.length} in "
                f"blocks of {BLOCK}"
            )
        gaps = _clipped(self.geometry.gaps(), start, end)
        codec = self.codec(seed, start)
        if self.moments is not None:
            codec = WithMoments(codec, self.moments)
        return Part(self.name, self.identifier, end - start, codec, tuple(gaps))


def _clipped(intervals: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What of `intervals` lies in [start, end), counted from `start`; empty ones are left out."""
    cut = [(max(low, start) - start, min(high, end) - start) for low, high in intervals]
    return [(low, high) for low, high in cut if low < high]
