"""What a rank finds in the contributions to an exchange, as whole numbers for its vote.

Computed in fp64 and rounded at the end. Two machines may differ by one in the last place: the
numbers are opinions, which the coordinator settles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median_low

import torch
from torch import Tensor

from dilocox.coordinator.protocol.verdicts import CAP, MILLI, WHOLE, RankOpinion

_PIECE = 1 << 18
"""Values that are looked at at a time, as fp64."""
_DEVICE_PIECE = 1 << 24
"""Those on another device than a CPU, where every operation is a launch of its own."""
_STEPS = 64
"""Of the geometric median: enough for eight points of any spread to settle to 16 bits."""


def examine(
    sent: Mapping[str, Tensor],
    weights: Mapping[str, float],
    offsets: Sequence[int],
    aggregation: str,
    picked: bool = False,
) -> dict[str, RankOpinion]:
    """Opinions of `sent`, decoded and finite, flat fp32 [n] each, by site.

    A site's pseudo-gradient is what it sent over its weight w_i. `offsets` are where tensors begin
    in the buffer, the first at 0, ascending; `aggregation` decides what `shares` are of. `picked`:
    each site has sent few values, others than the next one (`dilocox.config.codec_spec.PICKED`).
    """
    if not sent:
        return {}
    sites = list(sent)
    length = sent[sites[0]].numel()
    bounds = [*offsets, length] if offsets else [0, length]
    grams = [
        gram([sent[site][start:end] for site in sites], [weights[site] for site in sites])
        for start, end in pairwise(bounds)
    ]
    total = _added(grams, len(sites))
    norms = [math.sqrt(total[number][number]) for number in range(len(sites))]
    middle = _usual(norms)
    if aggregation == "clip":
        shares = _clip_shares(grams, norms, picked)
    elif aggregation == "rfa":
        shares = [[share] for share in rfa_shares(total)]
    else:
        shares = [[] for _ in sites]
    found = {}
    for number, site in enumerate(sites):
        found[site] = RankOpinion(
            code="zero" if norms[number] == 0 else "admitted",
            norm=_milli(norms[number] / middle) if middle > 0 else None,
            cosine=_cosine(total, number),
            shares=shares[number],
        )
    return found


def gram(rows: Sequence[Tensor], weights: Sequence[float]) -> list[list[float]]:
    """Inner products of the rows over their weights, fp64 [sites x sites]."""
    count, length, device = len(rows), rows[0].numel(), rows[0].device
    total = torch.zeros(count, count, dtype=torch.float64, device=device)
    size = _PIECE if device.type == "cpu" else _DEVICE_PIECE
    for start in range(0, length, size):
        piece = torch.stack([row[start : start + size].to(torch.float64) for row in rows])
        total += piece @ piece.T
    scale = torch.tensor(weights, dtype=torch.float64)
    found: list[list[float]] = (total.cpu() / scale[:, None] / scale[None, :]).tolist()
    return found


def _added(grams: Sequence[Sequence[Sequence[float]]], count: int) -> list[list[float]]:
    return [
        [math.fsum(each[row][column] for each in grams) for column in range(count)]
        for row in range(count)
    ]


def _usual(norms: Sequence[float]) -> float:
    """Lower median of the norms of those that have sent anything; 0 if nobody has."""
    return median_low([norm for norm in norms if norm > 0] or [0.0])


def _clip_shares(
    grams: Sequence[Sequence[Sequence[float]]], norms: Sequence[float], picked: bool
) -> list[list[int]]:
    """By site and tensor: median norm over norm, at most one. `norms` are of all tensors together.

    A site that has sent nothing at all has no say. Where half of the others or more have nothing of
    a tensor, what counts of the whole contribution counts of it: nobody is cut down to nothing, and
    nobody sends more of it than others send altogether. So it is with all tensors where values are
    picked: how many of them a small tensor gets in one round is chance, and no measure for others.
    """
    of_all = _cut(norms, _usual(norms))
    shares: list[list[int]] = [[] for _ in norms]
    for each in grams:
        own = [math.sqrt(each[number][number]) for number in range(len(norms))]
        middle = median_low(
            [one for one, norm in zip(own, norms, strict=True) if norm > 0] or [0.0]
        )
        of_tensor = of_all if picked or middle == 0 else _cut(own, middle)
        for number, share in enumerate(of_tensor):
            shares[number].append(share)
    return shares


def _cut(norms: Sequence[float], most: float) -> list[int]:
    """What is left of each if none may be more than `most`."""
    return [int(most / norm * WHOLE) if norm > most else WHOLE for norm in norms]


def rfa_shares(products: Sequence[Sequence[float]]) -> list[int]:
    """How much of each point is in the geometric median of all, the most being 65,536.

    From inner products alone: the median lies in the points' span (Weiszfeld's iteration, smoothed
    as in RFA, arXiv 1912.13445). The share of a point is the reciprocal of its distance.
    """
    count = len(products)
    norms = [math.sqrt(products[number][number]) for number in range(count)]
    middle = median_low(norms)
    floor = 1e-6 * middle or 1e-30
    shares = [1.0 / max(norm, floor) for norm in norms]
    for _ in range(_STEPS):
        total = math.fsum(shares)
        mixed = [share / total for share in shares]
        inner = [math.fsum(m * p for m, p in zip(mixed, row, strict=True)) for row in products]
        centre = math.fsum(m * i for m, i in zip(mixed, inner, strict=True))
        shares = []
        for number in range(count):
            square = products[number][number] - 2 * inner[number] + centre
            shares.append(1.0 / max(math.sqrt(max(square, 0.0)), floor))
    most = max(shares)
    return [round(share / most * WHOLE) for share in shares]


def _cosine(products: Sequence[Sequence[float]], number: int) -> int | None:
    """Of one point and the mean direction of the others; none if there is none.

    The others count as directions, whatever their length: a long one must not make all look odd.
    """
    norms = [math.sqrt(products[each][each]) for each in range(len(products))]
    others = [other for other in range(len(products)) if other != number and norms[other] > 0]
    if norms[number] <= 0:
        return None
    inner = math.fsum(products[number][each] / norms[number] / norms[each] for each in others)
    square = math.fsum(
        products[one][two] / norms[one] / norms[two] for one in others for two in others
    )
    if square <= 0:
        return None
    return round(max(-1.0, min(1.0, inner / math.sqrt(square))) * MILLI)


def _milli(value: float) -> int:
    return int(min(value * MILLI, CAP))
