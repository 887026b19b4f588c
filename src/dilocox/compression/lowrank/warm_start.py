"""The warm start of the low-rank codec: what becomes of Q from one exchange to the next.

A warm start follows the largest singular directions from round to round for the price of one
projection each (PowerSGD, 1905.13727). It can also lock in: a direction that comes up in u but is
orthogonal to Q is found through noise alone. So some columns are refreshed from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.compression.lowrank.layout import Stack

REFRESH_EVERY = 8
"""Landings between two refreshes.

A refreshed column is a random sketch of u; orthogonal iteration turns it to the largest of what
the other columns leave, by the squared ratio of singular values at each landing: a ratio of 1.3 is
2^6 after eight. By then the column has earned its place or is the weakest again.
"""
REFRESH_SHARE = 8
"""One column in so many is refreshed, at least one: every eighth at every eighth landing costs
less than 2 % of all columns' iterations."""

_SEED = 0x10A2


def seeded(length: int, number: int) -> Tensor:
    """fp32 [length] on the CPU: odd whole numbers in ±65535, for a seed `number` from 0.

    They come from the generator as whole numbers: a normal distribution would take logarithms,
    whose last bits differ between machines.
    """
    generator = torch.Generator().manual_seed(_SEED + number)
    drawn = torch.randint(-(1 << 15), 1 << 15, (length,), generator=generator)
    return drawn.mul_(2).add_(1).to(torch.float32)


def strongest(columns: Tensor) -> Tensor:
    """[rank, size] ordered by each column's largest magnitude, the largest first."""
    return columns[_strength(columns).argsort(descending=True, stable=True)]


def refreshed(mean: Tensor, warm: Tensor, stacks: Sequence[Stack], count: int) -> Tensor:
    """The warm start after landing `count` from the contributions' `mean` Q, which it overwrites.

    A column of zeros stays as it was in `warm`: a matrix without gradient says nothing. When
    `count` is a multiple of `REFRESH_EVERY`, the weakest columns of each matrix start afresh.
    Strength is a largest magnitude, not a sum, so all machines choose the same.
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
