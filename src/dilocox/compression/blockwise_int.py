"""Symmetric integers in blocks of 128 values, with one bf16 scale per block.

Payload: the n / 128 scales, then the codes. A code is in ±127 (int8) or ±7 (int4). int4 packs two
codes into one signed byte, `low + 16 * high`: `low` is from the first half of the block, `high`
from the second half. So packing is arithmetic on contiguous halves.

Why the result has the same bits on every machine:

- The scale is `bf16(absmax * fp32(1 / largest))`. The code is `round(value * (1 / scale))`, ties to
  even. A maximum does not depend on the order of the values. Product, reciprocal and rounding are
  correctly rounded elementwise operations. There is no division by a constant, which some devices
  turn into a product, and no sum that could be fused.
- bf16 has 8 significant bits, so `absmax / scale` is below `largest + 1/2` and rounds to at most
  `largest`: no code needs clamping. Code times scale has at most 15 significant bits, so it is
  exact in fp32. It is below the largest finite fp32 value even for the largest input.
- A scale is at least 2^-125, also in a block of zeros, whose codes are 0. So no division by zero
  occurs. Values below the normal fp32 numbers become 0, whether or not the processor flushes
  subnormal numbers.

The error of a value is at most half of its block's scale, times 1 + 2^-15 because of rounding
twice.
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
    refuse_non_finite,
)

_SMALLEST_SCALE = 2.0**-125
_LARGEST_VALUE = torch.finfo(torch.float32).max
_HALF = BLOCK // 2


@dataclass(frozen=True)
class Quantised:
    """Codec with codes of `bits` bits: 8, or 4 (two codes per byte)."""

    name: str
    identifier: int
    bits: int
    numbers: tuple[int, int] = (0, 0)

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def payload_bytes(self, n: int) -> int:
        """Return n / 64 bytes of scales plus n * bits / 8 bytes of codes."""
        return check_count(n) // BLOCK * (2 + BLOCK * self.bits // 8)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`. Works through `values` in pieces that stay in the cache."""
        n = check_values(values)
        payload = output(out, self.payload_bytes(n), torch.uint8, values.device)
        scales, codes = self._parts(payload, n)
        blocks = values.view(-1, BLOCK)
        work: Tensor | None = None
        for start, end in pieces(n, values.device):
            first, last = start // BLOCK, end // BLOCK
            if work is None:
                work = torch.empty((last, BLOCK), dtype=torch.float32, device=values.device)
            some = work[: last - first]
            torch.abs(blocks[first:last], out=some)
            scale = some.amax(1, keepdim=True).mul_(1.0 / self.largest).to(torch.bfloat16)
            scale.clamp_(min=_SMALLEST_SCALE)
            scales[first:last].copy_(scale.view(-1))
            torch.mul(blocks[first:last], scale.to(torch.float32).reciprocal_(), out=some)
            some.round_()
            if self.bits == 4:
                low, high = some[:, :_HALF], some[:, _HALF:]
                # Small whole numbers are exact, whether or not product and sum are fused.
                codes[first:last].copy_(torch.add(low, high, alpha=16))
            else:
                codes[first:last].copy_(some)
        return payload

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        payload = check_payload(payload, self.payload_bytes(n), self.name, n)
        values = output(out, n, torch.float32, payload.device)
        scales, codes = self._parts(payload, n)
        limit = torch.tensor(_LARGEST_VALUE / self.largest).to(torch.bfloat16)
        top = check_scales(scales, _SMALLEST_SCALE, float(limit), self.name)
        blocks = values.view(-1, BLOCK)
        for start, end in pieces(n, payload.device):
            first, last = start // BLOCK, end // BLOCK
            some, scale = blocks[first:last], scales[first:last].to(torch.float32).view(-1, 1)
            if self.bits == 4:
                packed = codes[first:last]
                some[:, :_HALF].copy_((packed << 4).bitwise_right_shift_(4))
                # `low` is in ±7, so `packed + 8` is in [16 * high + 1, 16 * high + 15]: a shift
                # right by 4 gives `high`.
                some[:, _HALF:].copy_((packed + 8).bitwise_right_shift_(4))
            else:
                some.copy_(codes[first:last])
            some.mul_(scale)
        # No encoder writes the code -largest - 1. Only this code times a scale can overflow.
        if top * (self.largest + 1) > _LARGEST_VALUE:
            refuse_non_finite(values, self.name)
        return values

    def _parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales, bf16 [n / 128], and the packed codes, int8 [n / 128,
        bytes]."""
        blocks = n // BLOCK
        scales = payload[: 2 * blocks].view(torch.bfloat16)
        codes = payload[2 * blocks :].view(torch.int8).view(blocks, BLOCK * self.bits // 8)
        return scales, codes


def build_int8(*_: int) -> Quantised:
    """`int8`."""
    return Quantised("int8", 4, bits=8)


def build_int4(*_: int) -> Quantised:
    """`int4`."""
    return Quantised("int4", 5, bits=4)
