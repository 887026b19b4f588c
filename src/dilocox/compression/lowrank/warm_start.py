"""The warm start of the low-rank codec: Q of one exchange is the start for the next exchange.

A warm start follows the largest singular directions from round to round, at the cost of one
projection per round (PowerSGD, arXiv 1905.13727). It can also lock in: a new direction in u that is
orthogonal to Q is found through noise alone. So some columns are refreshed from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.compression.lowrank.layout import Stack

REFRESH_EVERY = 8
"""Landings between two refreshes.

A refreshed column is a random sketch of u. Orthogonal iteration turns it towards the largest
direction that the other columns leave. Each landing gains the squared ratio of the singular values:
a ratio of 1.3 makes about 2^6 after eight landings. By then the column is stronger than others, or
it is the weakest again.
"""
REFRESH_SHARE = 8
"""One in `REFRESH_SHARE` columns is refreshed, at least one. Every eighth column at every eighth
landing costs less than 2 % of all columns' iterations."""

_SEED = 0x10A2


def seeded(length: int, number: int) -> Tensor:
    """Return random odd whole numbers in ±65535, fp32 [length] on the CPU, for seed `number` >= 0.

    The generator draws whole numbers, because a normal distribution needs logarithms, whose last
    bits differ between machines.
    """
    generator = torch.Generator().manual_seed(_SEED + number)
    drawn = torch.randint(-(1 << 15), 1 << 15, (length,), generator=generator)
    return drawn.mul_(2).add_(1).to(torch.float32)


def strongest(columns: Tensor) -> Tensor:
    """Return columns [rank, size], ordered by their largest magnitude, the largest first."""
    return columns[_strength(columns).argsort(descending=True, stable=True)]


def refreshed(mean: Tensor, warm: Tensor, stacks: Sequence[Stack], count: int) -> Tensor:
    """Return the warm start after landing `count`. `mean`, the mean Q, is overwritten with it.

    A column of zeros keeps its value in `warm`, because a matrix without gradient gives no
    direction. If `count` is a multiple of `REFRESH_EVERY`, seeded columns replace the weakest
    columns of each matrix. The strength of a column is its largest magnitude, not a sum, so all
    machines choose the same columns.
    """
    refresh = count % REFRESH_EVERY == 0
    fresh = seeded(mean.numel(), 1 + count).to(mean.device) if refresh else None
    for stack in stacks:
        columns = stack.view(mean)
        strength = _strength(columns)
        columns.copy_(torch.where((strength == 0).unsqueeze(2), stack.view(warm), columns))
        if fresh is not None:
            weakest = torch.argsort(strength, dim=1, stable=True)
            weakest = weakest[:, : -(-stack.rank // REFRESH_SHARE)]
            stale = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, weakest, True)
            columns.copy_(torch.where(stale.unsqueeze(2), stack.view(fresh), columns))
    return mean


def _strength(columns: Tensor) -> Tensor:
    return columns.abs().amax(-1)
