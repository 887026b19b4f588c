"""Averages of contributions, in fp32 and in a fixed order: every site gets the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dilocox.compression import BLOCK, Part
from dilocox.errors import ExchangeError


def average(decoded: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Δ = Σ sent_i / Σ w_i over the contribution set, flat fp32 [n].

    `decoded` yields the contributions sent_i (flat fp32 [n], already multiplied by w_i) in the
    order of the contribution set. They are read one at a time and stay unchanged. `weights` are
    the w_i in the same order. Raises `ExchangeError` if the set is empty, if the sum of the weights
    is not positive, or if there are more or fewer contributions than weights.
    """
    return divided(*added(decoded), weights)


def added(decoded: Iterable[Tensor]) -> tuple[Tensor | None, int]:
    """Return the sum of contributions, flat fp32 [n], and their number; (None, 0) without any.

    See `average`. No contribution is kept while the next contribution is decoded.
    """
    total: Tensor | None = None
    count = 0
    for sent in decoded:
        total = sent.clone() if total is None else total.add_(sent)
        count += 1
        del sent
    return total, count


def divided(total: Tensor | None, count: int, weights: Sequence[float]) -> Tensor:
    """Return `total`, which is overwritten, over the sum of the `weights`.

    `count` contributions are in `total`. Raises `ExchangeError` as `average` does.
    """
    weight = sum(weights)
    if total is None or count != len(weights) or not weight > 0:
        raise ExchangeError(
            f"cannot average {count} contributions of weights {list(weights)}: the sites disagree "
            "about the contribution set"
        )
    # The divisor is a tensor on purpose: some devices turn a division by a plain number into a
    # multiplication, which rounds otherwise.
    return total.div_(torch.full((1,), weight, dtype=total.dtype, device=total.device))


def chunk_bounds(n: int, owners: int) -> list[tuple[int, int]]:
    """Return [start, end) of the chunk that each of `owners` sites averages in exchange `reduce`.

    The chunks are contiguous, consist of whole blocks of 128 values, and cover all `n` values.
    Sizes differ by at most one block. With fewer blocks than owners, some chunks are empty. Raises
    `ExchangeError` if `n` is not a multiple of 128, or without owners.
    """
    if n % BLOCK or owners < 1:
        raise ExchangeError(f"cannot divide {n} values among {owners} owners in blocks of {BLOCK}")
    blocks = n // BLOCK
    cuts = [number * blocks // owners * BLOCK for number in range(owners + 1)]
    return list(pairwise(cuts))


@dataclass(frozen=True)
class Requantised:
    """Mean of a chunk, encoded by its owner for the other sites in exchange `reduce`."""

    payload: Tensor
    """uint8, the encoded mean."""
    decoded: Tensor
    """The decoded mean, which every site applies, the owner included."""
    second_error: Tensor
    """(Σ w) · (mean - decoded), which enters the owner's residual (docs/algorithm.md §2).

    Sites that apply `decoded` leave (mean - decoded) out of the mean. Of the sum of contributions
    they leave out (Σ w) times as much. The owner alone sends the difference again, so it is
    corrected exactly once.
    """


def requantise(part: Part, mean: Tensor, weight: float) -> Requantised:
    """Encode the mean, flat fp32, of contributions; `weight` is the sum of their weights."""
    payload = part.encode(mean)
    decoded = part.decode(payload)
    return Requantised(payload, decoded, torch.sub(mean, decoded).mul_(weight))
