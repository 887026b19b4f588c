"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dilocox.utils.rounding import round_to_bf16

__all__ = ["MOMENTUM_DTYPES", "as_kept", "nesterov_step", "round_to_bf16"]

MOMENTUM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes that the outer momentum may have, by their names in run files and records."""


def nesterov_step(
    anchor: Tensor, momentum: Tensor, average: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """Take one outer step in place: m = μ·m + Δ, then θ = θ − γ·(Δ + μ·m).

    This is DiLoCo's outer step (arXiv 2311.08105), in the form of PyTorch's SGD with `nesterov`.
    Products and sums are separate operations, and each rounds once, so the anchor has the same bits
    at every site on any processor.

    Args:
        anchor: θ, flat fp32; changed in place.
        momentum: m, flat fp32 or bf16, on the same device; changed in place. A bf16 momentum is
            rounded once, after the step; the step itself uses the unrounded m.
        average: Δ, flat fp32, unchanged.
        learning_rate: γ.
        momentum_factor: μ.
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
    """Return an outer momentum (flat fp32) in `dtype`: itself for fp32, rounded for bf16."""
    return momentum if dtype == torch.float32 else round_to_bf16(momentum)
