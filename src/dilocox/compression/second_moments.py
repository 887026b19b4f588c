"""Row means of second moments, one byte each, which follow a payload.

AdamW divides by the root of its second moments, and every site has second moments of its own. So a
parameter that hardly matters to a site's text moves as far at that site as an important one. Sites
send each other the mean of every row, a part of the rows per exchange. Each site scales its own
rows to the mean over the sites (docs/algorithm.md §2).

A payload with moments is the payload of its codec, then one byte per due row. Byte 0 means no
value: no moment, or a mean below 2^-60. A byte c from 1 to 255 stands for the fp32 numbers whose
bits, without the lowest 21, are c + 267. So an octave from 2^-60 to 14 has four steps; 255 stands
for larger numbers too. The conversion uses whole numbers, so it is equal on every machine.

Every tensor of two or more dimensions has rows; all dimensions but the last count them. The rows of
all tensors of a buffer follow one another. In exchanges of round r, row i of a tensor is due if
i mod `PERIOD` = r mod `PERIOD`, whatever else the buffer holds. In a shard, i counts from the first
row of the whole tensor. If fewer rows of a tensor are due than in other rounds, its last byte is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.base import Codec, check_payload, output
from dilocox.compression.buffer_layout import Geometry
from dilocox.config.codec_spec import WITH_MOMENTS

PERIOD = 32
"""Number of exchanges of a fragment in which each of its rows is due once."""
IDENTIFIER = 0x100
"""Number that a codec with moments adds to the codec's identifier."""

SMALLEST = 2.0**-60
"""Smallest mean that a byte can hold. A row with a smaller mean is neither sent nor scaled."""

_DROPPED = 21
_BELOW = 267
_LARGEST = 255


def row_counts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of rows of each tensor: 0 with fewer than two dimensions, or if empty."""
    return [math.prod(shape[:-1]) if len(shape) > 1 and min(shape) > 0 else 0 for shape in shapes]


def due_counts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return, per tensor, the bytes that travel with one exchange; some may be unused."""
    return [-(-count // PERIOD) for count in row_counts(shapes)]


def due_rows(geometry: Geometry) -> int:
    """Return the bytes of second moments that travel with one exchange of a whole buffer."""
    return sum(due_counts(geometry.shapes))


@dataclass(frozen=True)
class SecondMoments:
    """Second moments of a rank's inner optimizer."""

    live: Mapping[str, Tensor]
    """Second moments by full name: fp32, local shape, the optimizer's own storage."""
    weights: Tensor
    """1 - beta2^steps, the bias correction: a fp32 scalar on the device of the moments. It is small
    after the first steps. Moments are divided by it before they are compared and sent."""
    first_rows: Mapping[str, int]
    """First row of this rank's shard within the whole tensor, by name. A missing name means 0."""


def carried(payload: Tensor, geometry: Geometry) -> Tensor:
    """Return the moments, uint8 [due_rows], at the end of a payload of a whole buffer."""
    return payload[len(payload) - due_rows(geometry) :]


def to_bytes(moments: Tensor) -> Tensor:
    """Convert fp32 [n], finite and not negative, to uint8 [n] in the format of the module."""
    codes = (moments.contiguous().view(torch.int32) >> _DROPPED) - _BELOW
    return codes.clamp_(0, _LARGEST).to(torch.uint8)


def from_bytes(codes: Tensor) -> Tensor:
    """Convert uint8 [n] to fp32 [n]: the middle of the range of a byte; 0 for byte 0."""
    bits = (codes.to(torch.int32) + _BELOW << _DROPPED) + (1 << _DROPPED - 1)
    return torch.where(codes == 0, 0.0, bits.view(torch.float32))


@dataclass(frozen=True)
class WithMoments:
    """A codec whose payloads end with second moments."""

    codec: Codec
    moments: Tensor
    """Moments that `encode` sends, uint8 [due_rows]."""

    @property
    def name(self) -> str:
        """Canonical spec."""
        return f"{self.codec.name}{WITH_MOMENTS}"

    @property
    def identifier(self) -> int:
        """Number in the frame header."""
        return IDENTIFIER + self.codec.identifier

    @property
    def numbers(self) -> tuple[int, int]:
        """The codec's numbers."""
        return self.codec.numbers

    def payload_bytes(self, n: int) -> int:
        """Return the size of the codec's payload plus one byte per due row."""
        return self.codec.payload_bytes(n) + len(self.moments)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        size = self.payload_bytes(values.numel())
        payload = output(out, size, torch.uint8, values.device)
        own = self.codec.payload_bytes(values.numel())
        self.codec.encode(values, payload[:own])
        payload[own:].copy_(self.moments)
        return payload

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`. Returns the values without the moments."""
        check_payload(payload, self.payload_bytes(n), self.name, n)
        return self.codec.decode(payload[: self.codec.payload_bytes(n)], n, out)
