"""Two bits per value: four levels, ±0.5 and ±1.5 of one bf16 scale per block of 128 values.

Payload: the n / 128 scales, then 32 bytes per block. A code from 0 to 3 decodes to
(code - 1.5) * scale. Byte j of a block holds the codes of values j, j + 32, j + 64 and j + 96, the
first in the lowest bits. So packing is arithmetic on contiguous quarters. A scale is from 2^-125 to
2^127, or 0 for a block that decodes to zeros.

The scale is chosen for a small squared error. It starts at 1.25 times the mean magnitude, which
fits normally distributed values. Then two steps of Lloyd's iteration set it to the best scale for
the present codes: (sum of magnitudes times their levels) / (sum of squared levels). The error is
then within 1 % of the least possible for normal, Laplacian and Student distributions, and within
2.5 % for uniform ones. Without the two steps the error is 2 to 50 % above the least possible; it is
larger for distributions that are farther from normal.

Magnitudes enter the sums as whole numbers up to 2^16, in units of the block's largest magnitude
over 2^16. Every sum is below 2^24 and so exact in fp32 in any order: payloads do not depend on the
machine. No code decodes to zero: a zero in a block of other values decodes to half a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression.base import (
    BLOCK,
    check_count,
    check_payload,
    check_scales,
    check_values,
    output,
    pieces,
)

_QUARTER = BLOCK // 4
_SMALLEST_SCALE = 2.0**-125
_LARGEST_SCALE = 2.0**127
_STEPS = 2
_UNIT = 2.0**-16


@dataclass(frozen=True)
class Int2:
    """Codec `int2`: 2.125 bits per value. Without error feedback it is too coarse for training."""

    name: str = "int2"
    identifier: int = 6
    numbers: tuple[int, int] = (0, 0)

    def payload_bytes(self, n: int) -> int:
        """Return n / 64 bytes of scales plus n / 4 bytes of codes."""
        return check_count(n) // BLOCK * (2 + _QUARTER)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        scales, codes = self._parts(payload, n)
        blocks = values.view(-1, BLOCK)
        for start, end in pieces(n, values.device):
            first, last = start // BLOCK, end // BLOCK
            some = blocks[first:last]
            scale = _scale(some)
            scales[first:last].copy_(scale.view(-1))
            wide = scale.to(torch.float32)
            # With a scale of 0 every product is 0, and all codes are equal.
            inverse = torch.where(wide > 0, wide.reciprocal(), 0.0)
            code = torch.mul(some, inverse).floor_().clamp_(-2, 1).add_(2)
            packed = code[:, 3 * _QUARTER :]
            for quarter in (2, 1, 0):
                rest = code[:, quarter * _QUARTER : (quarter + 1) * _QUARTER]
                # Small whole numbers are exact, whether or not product and sum are fused.
                packed = torch.add(rest, packed, alpha=4)
            codes[first:last].copy_(packed)
        return payload

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device)
        scales, codes = self._parts(payload, n)
        check_scales(scales, _SMALLEST_SCALE, _LARGEST_SCALE, self.name, zero=True)
        blocks = values.view(-1, BLOCK)
        for start, end in pieces(n, payload.device):
            first, last = start // BLOCK, end // BLOCK
            some, scale = blocks[first:last], scales[first:last].to(torch.float32).view(-1, 1)
            packed = codes[first:last]
            for quarter in range(4):
                code = (packed >> (2 * quarter)).bitwise_and_(3)
                some[:, quarter * _QUARTER : (quarter + 1) * _QUARTER].copy_(code)
            some.sub_(1.5).mul_(scale)
        return values

    def _parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales, bf16 [n / 128], and the packed codes, uint8 [n / 128, 32]."""
        blocks = n // BLOCK
        scales = payload[: 2 * blocks].view(torch.bfloat16)
        return scales, payload[2 * blocks :].view(blocks, _QUARTER)


def _scale(blocks: Tensor) -> Tensor:
    """Return the scale, bf16 [blocks, 1], of each row of fp32 [blocks, 128]."""
    magnitude = blocks.abs()
    unit = magnitude.amax(1, keepdim=True).clamp_(min=_SMALLEST_SCALE / _UNIT).mul_(_UNIT)
    whole = magnitude.mul_(unit.reciprocal()).round_()
    total = whole.sum(1, keepdim=True)
    level = total * (1.25 / BLOCK)
    for _ in range(_STEPS):
        # A magnitude x is large if it is at least `level`: in whole numbers, if x > limit. `over`
        # is x - limit, at least 1, for a large magnitude, and 0 for a small one.
        limit = level.ceil_().sub_(1)
        over = torch.sub(whole, limit).clamp_(min=0)
        excess = over.sum(1, keepdim=True)
        count = over.clamp_(max=1).sum(1, keepdim=True)
        # Levels are 0.5 and 1.5. Weighted sum: 0.5 of all magnitudes plus 1 of the large ones. Sum
        # of squared levels: 0.25 per value plus 2 per large value.
        weighted = total.mul(0.5).add_(excess).add_(limit.mul_(count))
        level = weighted.div_(count.mul_(2).add_(0.25 * BLOCK))
    scale = level.mul_(unit).clamp_(max=_LARGEST_SCALE)
    return torch.where(scale < _SMALLEST_SCALE, 0.0, scale).to(torch.bfloat16)


def build_int2(*_: int) -> Int2:
    """`int2`."""
    return Int2()
