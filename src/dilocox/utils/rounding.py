"""Rounding from fp32 to bf16, with the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_bf16(values: Tensor) -> Tensor:
    """Round an fp32 tensor to bf16: to nearest, ties to even. `values` must not contain NaN.

    Subnormal values are rounded too. The function computes with integers, since processors differ:
    some instructions treat subnormal values as zero (Intel's VCVTNEPS2BF16, by its manual).
    """
    bits = values.view(torch.int32)
    up = bits.bitwise_right_shift(16).bitwise_and_(1).add_(0x7FFF)
    return up.add_(bits).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


AT_ONCE = 1 << 22
"""Values that `is_bf16` tests per step. Most tensors that are not bf16 fail in the first step."""


def is_bf16(values: Tensor) -> bool:
    """Returns whether every value of an fp32 tensor is exactly representable in bf16."""
    bits = values.reshape(-1).view(torch.int32)
    return not any(bool(part.bitwise_and(0xFFFF).any()) for part in bits.split(AT_ONCE))
