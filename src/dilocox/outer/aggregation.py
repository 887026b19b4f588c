"""Aggregation of a contribution set, with the same bits at every site and in every replay.

Aggregation uses elementwise operations in a fixed order. Each operation rounds once; sorting
compares and never rounds. Floating point does not decide how much of a contribution counts: the
sites agree on that share as a whole number beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from dilocox.config.admission import BY_VALUE
from dilocox.coordinator.protocol.verdicts import WHOLE
from dilocox.errors import ExchangeError
from dilocox.outer.averaging import average

Share = TypeVar("Share")


def aggregate(
    aggregation: str,
    decoded: Iterable[Tensor],
    weights: Sequence[float],
    shares: Sequence[Sequence[int]] = (),
    offsets: Sequence[int] = (),
) -> Tensor:
    """Return Δ of the contribution set, flat fp32 [n].

    Args:
        aggregation: see `dilocox.config.admission`.
        decoded: the contributions sent_i in the order of the set, flat fp32 [n] each, already
            multiplied by w_i. They may be overwritten.
        weights: w_i of each contribution.
        shares: how much of each contribution counts, in 65,536ths. `clip` takes one number per
            tensor, `rfa` one number; the other rules take none. If all shares of `rfa` are 0, the
            contributions count by their weights alone.
        offsets: position at which each tensor begins in the buffer; used by `clip`.

    Raises `ExchangeError` if the numbers of contributions, weights or shares do not fit together.
    """
    if aggregation == "clip":
        return average(_clipped(decoded, shares, offsets), weights)
    if aggregation == "rfa":
        return _weighted(decoded, weights, shares)
    if aggregation in BY_VALUE:
        return _by_value(aggregation, list(decoded), weights)
    return average(decoded, weights)


def _clipped(
    decoded: Iterable[Tensor], shares: Sequence[Sequence[int]], offsets: Sequence[int]
) -> Iterator[Tensor]:
    for sent, own in _paired(decoded, shares):
        starts = list(offsets) or [0]
        if len(own) != len(starts):
            raise ExchangeError(f"{len(own)} shares were agreed on for {len(starts)} tensors")
        bounds = [*starts, sent.numel()]
        for share, (start, end) in zip(own, pairwise(bounds), strict=True):
            if share != WHOLE:
                sent[start:end].mul_(share / WHOLE)  # a share has 17 bits: exact in fp32
        yield sent
        del sent


def _weighted(
    decoded: Iterable[Tensor], weights: Sequence[float], shares: Sequence[Sequence[int]]
) -> Tensor:
    """Return the mean in which each contribution counts by its weight times its share."""
    if any(len(own) != 1 for own in shares) or len(shares) != len(weights):
        raise ExchangeError("the geometric median needs one share for each contribution")
    parts = [own[0] / WHOLE for own in shares]
    if not any(parts):
        parts = [1.0] * len(parts)
    scaled = _scaled(decoded, parts)
    return average(scaled, [w * part for w, part in zip(weights, parts, strict=True)])


def _scaled(decoded: Iterable[Tensor], parts: Sequence[float]) -> Iterator[Tensor]:
    for sent, part in _paired(decoded, parts):
        yield sent.mul_(part)
        del sent


def _paired(decoded: Iterable[Tensor], shares: Sequence[Share]) -> Iterator[tuple[Tensor, Share]]:
    """Yield each contribution with its share. Raises `ExchangeError` if their numbers differ.

    Unlike `zip`, this keeps no contribution while the next contribution is decoded.
    """
    left = deque(shares)
    for sent in decoded:
        if not left:
            raise ExchangeError(f"there are more contributions than their {len(shares)} shares")
        yield sent, left.popleft()
        del sent
    if left:
        raise ExchangeError(f"{len(left)} of {len(shares)} shares have no contribution")


def _by_value(aggregation: str, decoded: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the median of each value, or the trimmed mean of each value.

    The trimmed mean leaves out the largest and the smallest quarter of the values. With three or
    more contributions it leaves out at least one value at each end; with fewer it leaves out none.
    """
    if not decoded or len(decoded) != len(weights):
        raise ExchangeError(
            f"cannot aggregate {len(decoded)} contributions of {len(weights)} sites"
        )
    count = len(decoded)
    for sent, weight in zip(decoded, weights, strict=True):
        # The divisor is a tensor on purpose, as in `average`. Adding 0 turns -0 into 0: sorting
        # takes the two for equal, so their order would depend on the device.
        sent.div_(torch.full((1,), weight, dtype=sent.dtype, device=sent.device)).add_(0.0)
    ordered = torch.sort(torch.stack(list(decoded)), dim=0).values
    quarter = max(1, count // 4) if count > 2 else 0
    cut = (count - 1) // 2 if aggregation == "median" else quarter
    return average(ordered[cut : count - cut], [1.0] * (count - 2 * cut))
