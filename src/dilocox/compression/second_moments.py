"""Row means of second moments, sent behind a payload: a byte each.

AdamW divides by the root of its second moments, and every site has moments of its own: a value that
hardly matters to a site's text moves as far there as one that does. Sites that tell each other the
mean of every row, a part of the rows per exchange, can set theirs to the mean over the sites
(docs/algorithm.md §2).

A payload with moments is that of its codec, then one byte per row that is due: 0 for none (no
moment, or less than 2^-60), else c from 1 to 255 for numbers whose fp32 bits, without the lowest
21, are c + 267: four steps to an octave, from 2^-60 to 14, 255 for what is more. Whole numbers, the
same everywhere. Rows are those of all tensors of two or more dimensions of a buffer, one after
another, by all dimensions but the last. In exchanges of round r row i of a tensor is due if i mod
`PERIOD` is r mod `PERIOD`, whatever else the buffer holds; of a shard, i counts from the whole
tensor's first row. Where fewer of a tensor are due than in other rounds its last byte is 0.
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
"""Exchanges of a fragment in which all of its rows have been due once."""
IDENTIFIER = 0x100
"""Added to that of the codec."""

SMALLEST = 2.0**-60
"""Of what a byte can say. A row below has no moments worth telling or scaling."""

_DROPPED = 21
_BELOW = 267
_LARGEST = 255


def row_counts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Rows of each tensor; 0 for those of fewer than two dimensions or without elements."""
    return [math.prod(shape[:-1]) if len(shape) > 1 and min(shape) > 0 else 0 for shape in shapes]


def due_counts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Bytes for each tensor's rows that travel with one exchange; not all are used in each."""
    return [-(-count // PERIOD) for count in row_counts(shapes)]


def due_rows(geometry: Geometry) -> int:
    """Those of a whole buffer."""
    return sum(due_counts(geometry.shapes))


@dataclass(frozen=True)
class SecondMoments:
    """Those of a rank's inner optimizer."""

    live: Mapping[str, Tensor]
    """By full name: fp32, local shape, the optimizer's own storage."""
    weights: Tensor
    """What each has given out in weights so far, 1 - beta2^steps: a fp32 scalar on their device,
    small after a site's first steps. Moments are compared and shared divided by it."""
    first_rows: Mapping[str, int]
    """Of shards: the row of the whole tensor that is their first. Tensors left out are whole."""


def carried(payload: Tensor, geometry: Geometry) -> Tensor:
    """The moments behind a whole payload of a buffer: uint8 [due_rows]."""
    return payload[len(payload) - due_rows(geometry) :]


def to_bytes(moments: Tensor) -> Tensor:
    """fp32 [n], finite and not negative, to uint8 [n], as the module says."""
    codes = (moments.contiguous().view(torch.int32) >> _DROPPED) - _BELOW
    return codes.clamp_(0, _LARGEST).to(torch.uint8)


def from_bytes(codes: Tensor) -> Tensor:
    """uint8 [n] to fp32 [n]: the middle of what the byte stands for; 0 for none."""
    bits = (codes.to(torch.int32) + _BELOW << _DROPPED) + (1 << _DROPPED - 1)
    return torch.where(codes == 0, 0.0, bits.view(torch.float32))


@dataclass(frozen=True)
class WithMoments:
    """A codec whose payloads carry moments behind them."""

    codec: Codec
    moments: Tensor
    """uint8 [due_rows], what `encode` sends."""

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
        """The codec's."""
        return self.codec.numbers

    def payload_bytes(self, n: int) -> int:
        """That of the codec, and a byte per row."""
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
        """See `Codec.decode`: the values, without the moments."""
        check_payload(payload, self.payload_bytes(n), self.name, n)
        return self.codec.decode(payload[: self.codec.payload_bytes(n)], n, out)
