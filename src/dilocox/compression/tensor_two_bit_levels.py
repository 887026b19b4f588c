"""GPU implementation of `dilocox.compression.two_bit_levels`, with the same bits.

See `dilocox.compression.tensor_ops`. Sums are of whole numbers below 2^47 in int64, so they are
exact in every order. A GPU also gives the same result each time for sums of whole numbers, but not
for sums of fractions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.compression.tensor_ops import Refusals, bad_scales, scale_reason
from dilocox.compression.two_bit_levels import LARGEST_LEVEL, SMALLEST_NORMAL, WHOLE

_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(2**31)


def to_codes(bits: Tensor, zeros: bool = True) -> tuple[Tensor, Tensor]:
    """See `two_bit_levels.to_codes`: int32 [rows, k] to uint8 [rows, HEAD] and int16 [rows, k]."""
    levels, large = _two_levels(bits & _MAGNITUDE, zeros)
    codes = (bits < 0).to(torch.int16) | large.to(torch.int16) << 1
    return levels.to(torch.bfloat16).view(torch.uint8), codes


def from_codes(head: Tensor, codes: Tensor, refusals: Refusals) -> Tensor:
    """See `two_bit_levels.from_codes`: uint8 [rows, HEAD] and codes [rows, k] to int32 [rows, k].

    Codes are whole numbers. Bad levels go to `refusals`.
    """
    levels = head.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    refusals.add(
        bad_scales(levels, SMALLEST_NORMAL, LARGEST_LEVEL),
        scale_reason(SMALLEST_NORMAL, LARGEST_LEVEL),
    )
    codes = codes.to(torch.int64)
    found = levels.to(torch.float32).view(torch.int32).gather(1, codes >> 1)
    return found | (-(codes & 1)).to(torch.int32) & _SIGN


def _two_levels(magnitudes: Tensor, zeros: bool) -> tuple[Tensor, Tensor]:
    """See `two_bit_levels._two_levels`: levels, fp32 [rows, 2], and True for large magnitudes."""
    ascending = magnitudes.sort(dim=1).values
    k = ascending.shape[1]
    values = ascending.view(torch.float32).to(torch.float64)
    unit = values[:, -1:] * (1.0 / WHOLE)
    whole = (values / torch.where(unit > 0, unit, 1.0)).round_().to(torch.int64)
    sums = whole.cumsum(1).to(torch.float64)
    total, below = sums[:, -1:], sums[:, : max(k - 1, 1)]
    first = torch.arange(1, max(k, 2), device=magnitudes.device)
    left_out = torch.zeros_like(magnitudes[:, :1], dtype=torch.int64)
    if not zeros:
        left_out = (ascending == 0).sum(1, keepdim=True)
    count = (first - left_out).clamp_(min=1).to(torch.float64)
    rest = torch.minimum(k - first, k - left_out).clamp_(min=1).to(torch.float64)
    above = total - below
    # One operation at a time: a fused product and sum would round once instead of twice.
    error = below.mul(below).div_(count)
    error = error.add_(above.mul(above).div_(rest))
    cut = error.argmax(1, keepdim=True)
    low = below.div(count).gather(1, cut)
    high = above.div(rest).gather(1, cut) if k > 1 else low
    levels = torch.cat([low, high], 1).mul_(unit).to(torch.float32)
    levels.clamp_(max=LARGEST_LEVEL)
    large = magnitudes >= ascending.gather(1, (cut + 1).clamp_(max=k - 1))
    return torch.where(levels < SMALLEST_NORMAL, 0.0, levels), large
