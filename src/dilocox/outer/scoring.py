"""Scores of the contributions to an exchange (norm, direction, shares), as whole numbers.

A rank sends the scores with its vote. Scores are computed in fp64 and rounded at the end. Two
machines may differ by one in the last digit, so the coordinator chooses one value from all
opinions.
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
"""Values that are converted to fp64 at a time on a CPU."""
_DEVICE_PIECE = 1 << 24
"""The same on a GPU. Each operation is a kernel launch there, so larger pieces are faster."""
_STEPS = 64
"""Iterations of the geometric median: eight points of any spread converge to 16 bits."""


def examine(
    sent: Mapping[str, Tensor],
    weights: Mapping[str, float],
    offsets: Sequence[int],
    aggregation: str,
    picked: bool = False,
) -> dict[str, RankOpinion]:
    """Compare contributions with each other and return this rank's opinions, by site.

    Norms and directions are those of a site's pseudo-gradient: its contribution over its weight.

    Args:
        sent: decoded contribution by site, finite, flat fp32 [n] each.
        weights: w_i by site.
        offsets: position at which each tensor begins in the buffer, ascending from 0.
        aggregation: decides whether `shares` are per tensor (`clip`), one number (`rfa`) or empty.
        picked: True for a codec that sends few values, which each site picks for itself
            (`CodecKind.picks`).
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
    """Return the inner products of row / weight of all pairs of rows, computed in fp64.

    `rows`: one flat fp32 [n] per site. The result is a list of lists, [sites][sites].
    """
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
    """Lower median of the norms above zero; 0 if all norms are zero."""
    return median_low([norm for norm in norms if norm > 0] or [0.0])


def _clip_shares(
    grams: Sequence[Sequence[Sequence[float]]], norms: Sequence[float], picked: bool
) -> list[list[int]]:
    """Return the shares, [sites][tensors], in 65,536ths: median norm over own norm, at most 1.

    Norms of a tensor are compared with norms of the same tensor at other sites. Sites whose whole
    contribution is zero do not enter a median.

    A share of the whole contribution replaces the tensor's share in two cases:

    - The median norm of the tensor is zero. The tensor's share would then be zero at every site
      that sends any of it. The other share still limits the tensor: its norm counts no more than
      the median norm of whole contributions.
    - `picked` is True. How many values of a small tensor a site picks in one round is chance, so
      the tensor's norm cannot be compared between sites.

    Args:
        grams: inner products of the sites' contributions, [tensors][sites][sites].
        norms: norm of each site's whole contribution.
        picked: see `examine`.
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
    """Return the share, in 65,536ths, that cuts each norm down to at most `most`."""
    return [int(most / norm * WHOLE) if norm > most else WHOLE for norm in norms]


def rfa_shares(products: Sequence[Sequence[float]]) -> list[int]:
    """Return the share of each site's point in the geometric median of all points.

    The largest share is 65,536. The share of a point is proportional to the reciprocal of its
    distance from the median. `products`, [sites][sites], are the inner products of the points.
    They suffice for Weiszfeld's iteration, smoothed as in RFA (arXiv 1912.13445), because the
    median is a weighted mean of the points.
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
    """Return the cosine, in thousandths, between one point and the mean direction of the others.

    None if a direction does not exist. The others are scaled to length 1 first: otherwise one long
    point would turn the mean away from all honest ones.
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
