"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.utils.rounding import round_to_bf16

__all__ = ["MOMENTUM_DTYPES", "as_kept", "nesterov_step", "round_to_bf16"]

MOMENTUM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By their names in run files and records."""


def nesterov_step(
    anchor: Tensor, momentum: Tensor, average: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """One outer step in place; all tensors flat fp32 of the same length and device, `momentum`
    fp32 or bf16.

    m = μ·m + Δ, then θ = θ − γ·(Δ + μ·m) (DiLoCo, arXiv 2311.08105, in the form of PyTorch's
    SGD with nesterov). Products and sums are separate operations, each rounded once, so that
    the anchor has the same bits at every site whatever its processor. A momentum in bf16 is rounded
    once, when the step is done: the step itself goes by all of m.
    """
    kept = momentum.dtype == torch.float32
    total = momentum if kept else momentum.float()
    total.mul_(momentum_factor).add_(average)
    step = total * momentum_factor
    step.add_(average).mul_(learning_rate)
    anchor.sub_(step)
    if not kept:
        momentum.copy_(as_kept(total, momentum.dtype))


def as_kept(momentum: Tensor, dtype: torch.dtype) -> Tensor:
    """An outer momentum, flat fp32, as it is kept in `dtype`: fp32 (itself) or bf16."""
    return momentum if dtype == torch.float32 else round_to_bf16(momentum)
