"""Averages of contributions: fixed order, fp32, the same bits at every site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dilocox.compression import BLOCK, Part
from dilocox.errors import ExchangeError


def average(decoded: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Δ = Σ sent_i / Σ w_i over the contribution set, flat fp32 [n].

    `decoded` are the sent_i (flat fp32 [n], w_i already in them) in the order of the contribution
    set, taken one at a time; `weights` their w_i in that order. None of them is changed. Raises
    `ExchangeError` for an empty set, weights that do not add up to a positive number, or numbers
    of contributions and weights that differ.
    """
    total: Tensor | None = None
    count = 0
    for sent in decoded:
        total = sent.clone() if total is None else total.add_(sent)
        count += 1
    weight = sum(weights)
    if total is None or count != len(weights) or not weight > 0:
        raise ExchangeError(
            f"cannot average {count} contributions of weights {list(weights)}: the sites disagree "
            "about the contribution set"
        )
    # A tensor on purpose: some devices turn division by a plain number into a product.
    return total.div_(torch.full((1,), weight, dtype=total.dtype, device=total.device))


def chunk_bounds(n: int, owners: int) -> list[tuple[int, int]]:
    """[start, end) of the chunk that each of `owners` sites averages in exchange `reduce`.

    Contiguous, in whole blocks of 128, together n values; sizes differ by at most a block, and
    the chunks are empty for some owners if there are fewer blocks than owners.
    """
    if n % BLOCK or owners < 1:
        raise ExchangeError(f"cannot divide {n} values among {owners} owners in blocks of {BLOCK}")
    blocks = n // BLOCK
    cuts = [number * blocks // owners * BLOCK for number in range(owners + 1)]
    return list(pairwise(cuts))


@dataclass(frozen=True)
class Requantised:
    """A chunk's mean as its owner hands it round in exchange `reduce`."""

    payload: Tensor
    """uint8, the encoded mean."""
    decoded: Tensor
    """What every site, the owner too, applies."""
    second_error: Tensor
    """Sum of w times (mean - decoded): enters the owner's residual (docs/algorithm.md §2).

    Applying `decoded` withholds (mean - decoded) of the mean, which is that times the sum of w
    of the sum of contributions; sent again by this one site, it is made good exactly once.
    """


def requantise(part: Part, mean: Tensor, weight: float) -> Requantised:
    """Encode the mean (flat fp32) of contributions whose weights add up to `weight`."""
    payload = part.encode(mean)
    decoded = part.decode(payload)
    return Requantised(payload, decoded, torch.sub(mean, decoded).mul_(weight))
