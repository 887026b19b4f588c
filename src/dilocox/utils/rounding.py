"""fp32 to bf16 with the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_bf16(values: Tensor) -> Tensor:
    """fp32 to bf16, to nearest, ties to even; NaN excepted. Subnormal values too.

    By integers, since processors differ: some instructions for it take subnormal values for zero
    (Intel's VCVTNEPS2BF16, by its manual).
    """
    bits = values.view(torch.int32)
    up = bits.bitwise_right_shift(16).bitwise_and_(1).add_(0x7FFF)
    return up.add_(bits).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


AT_ONCE = 1 << 22
"""Values that `is_bf16` looks at before it goes on: most tensors show at once that they are not."""


def is_bf16(values: Tensor) -> bool:
    """True if every value of an fp32 tensor is one of bf16: rounding it loses nothing."""
    bits = values.reshape(-1).view(torch.int32)
    return not any(bool(part.bitwise_and(0xFFFF).any()) for part in bits.split(AT_ONCE))
