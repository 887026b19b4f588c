"""Parts of a flat buffer of tensors. One codec encodes each part separately."""

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
    """A range of values of the buffer, and its codec, which ignores the tensors' bounds."""

    name: str
    """Canonical spec."""
    identifier: int
    """Number in the frame header."""
    values: int
    """Number of values; a multiple of 128."""
    codec: Codec
    gaps: tuple[tuple[int, int], ...]
    """[start, end) of each interval that belongs to no tensor; zero after decoding."""

    @property
    def numbers(self) -> tuple[int, int]:
        """Parameters of the codec in the frame header; see `Codec.numbers`."""
        return self.codec.numbers

    @cached_property
    def payload_bytes(self) -> int:
        """Exact size of the payload."""
        return self.codec.payload_bytes(self.values)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode finite flat contiguous fp32 [values] to uint8 [payload_bytes], on their device.

        The result is `out` if given. Raises `ExchangeError` for another number of values, or if
        they are not flat contiguous fp32.
        """
        if check_values(values) != self.values:
            raise ExchangeError(
                f"{self.name}: a part of {self.values} values was given {values.numel()}"
            )
        return self.codec.encode(values, out)

    def decode(self, payload: Tensor, out: Tensor | None = None) -> Tensor:
        """Decode uint8 [payload_bytes] to finite fp32 [values] on its device, into `out` if given.

        Raises `ExchangeError` if the payload has another size, or as `Codec.decode` does.
        """
        values = self.codec.decode(payload, self.values, out)
        for start, end in self.gaps:
            values[start:end] = 0
        return values


@dataclass(frozen=True)
class Compressor:
    """A codec for a buffer of tensors. It encodes each part of the buffer separately."""

    name: str
    """Canonical spec."""
    identifier: int
    """Number in the frame header."""
    geometry: Geometry
    codec: Callable[[int, int], Codec]
    """Returns the codec of a part, from the seed and the part's place in the buffer."""
    moments: Tensor | None = None
    """Row means of second moments, uint8 [due_rows], which follow each payload. May be None."""

    def with_moments(self) -> Compressor:
        """Return a copy whose payloads carry second moments, which are zero until `carrying`."""
        zeros = torch.zeros(due_rows(self.geometry), dtype=torch.uint8)
        one = WithMoments(self.codec(0, 0), zeros)
        return replace(self, name=one.name, identifier=one.identifier, moments=zeros)

    def carrying(self, moments: Tensor) -> Compressor:
        """Return a copy whose payloads carry `moments`, uint8 [due_rows].

        Raises `ExchangeError` if dtype or shape differ, or if this codec carries no moments.
        """
        own = self.moments
        if own is None or moments.dtype != torch.uint8 or moments.shape != own.shape:
            due = "none" if own is None else f"uint8 {list(own.shape)}"
            raise ExchangeError(
                f"{self.name}: second moments must be {due}, got {moments.dtype} "
                f"{list(moments.shape)}"
            )
        return replace(self, moments=moments)

    @property
    def phases(self) -> tuple[Part, ...]:
        """The payload's properties: there is one phase (`FragmentCodec`)."""
        return (self.part(0, self.geometry.length),)

    @property
    def agreement(self) -> None:
        """None: sites encode without a basis."""
        return None

    def part(self, start: int, end: int, seed: int = 0, basis: Tensor | None = None) -> Part:
        """Return the part with values [start, end) of the buffer; both are multiples of 128.

        `seed` must be equal at all sites; only `cocktail` draws from it. `basis` has no
        effect. Raises `ExchangeError` if the interval is not in the buffer, or is not all of it
        while payloads carry moments.
        """
        if self.moments is not None and (start, end) != (0, self.geometry.length):
            raise ExchangeError(
                f"{self.name}: second moments can be sent with whole buffers only, not with parts"
            )
        if start % BLOCK or end % BLOCK or not 0 <= start <= end <= self.geometry.length:
            raise ExchangeError(
                f"values {start} to {end} are not whole blocks of {BLOCK} within a buffer of "
                f"{self.geometry.length} values"
            )
        gaps = _clipped(self.geometry.gaps(), start, end)
        codec = self.codec(seed, start)
        if self.moments is not None:
            codec = WithMoments(codec, self.moments)
        return Part(self.name, self.identifier, end - start, codec, tuple(gaps))


def _clipped(intervals: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return the non-empty parts of `intervals` within [start, end), relative to `start`."""
    cut = [(max(low, start) - start, min(high, end) - start) for low, high in intervals]
    return [(low, high) for low, high in cut if low < high]
