"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

from __future__ import annotations

from torch import Tensor


def nesterov_step(
    anchor: Tensor, momentum: Tensor, average: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """One outer step in place; all tensors flat fp32 of the same length and device.

    m = μ·m + Δ, then θ = θ − γ·(Δ + μ·m) (DiLoCo, arXiv 2311.08105, in the form of PyTorch's
    SGD with nesterov). Products and sums are separate operations, each rounded once, so that
    the anchor has the same bits at every site whatever its processor.
    """
    momentum.mul_(momentum_factor).add_(average)
    step = momentum * momentum_factor
    step.add_(average).mul_(learning_rate)
    anchor.sub_(step)
