"""Second moments that sites share: their row means, a part of the rows with every exchange.

See `dilocox.compression.second_moments` for why, and for what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dilocox.compression.second_moments import (
    PERIOD,
    SMALLEST,
    SecondMoments,
    due_counts,
    due_rows,
    from_bytes,
    to_bytes,
)
from dilocox.outer.layout import Layout

Second = Callable[[], SecondMoments]
"""Gives a rank's, as they are now."""


def none_held() -> SecondMoments:
    """Those of an inner optimizer that has none."""
    return SecondMoments({}, torch.ones(()), {})


def row_means(second: SecondMoments, layout: Layout, round_: int) -> Tensor:
    """What this rank says of a fragment's rows that are due in a round: uint8 [due] on the CPU.

    Rows of tensors without second moments are 0.
    """
    weights = second.weights
    said = torch.zeros(due_rows(layout.geometry), device=weights.device)
    for place, rows in _due(second, layout, round_):
        said[place : place + len(rows)] = rows.mean(1)
    # Before the first step there are neither moments nor weights.
    return to_bytes(torch.where(weights > 0, said / weights, 0.0)).cpu()


def told_by(carried: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What other sites have said: for each due row the sum of their means, fp32 [due], and of how
    many that is, int64 [due].

    `carried`: uint8 [due] of each other site that counts, in the order of the contribution set.
    """
    told = torch.stack([from_bytes(each) for each in carried])
    return told.sum(0), (told > 0).sum(0)


def take_means(
    second: SecondMoments, layout: Layout, round_: int, told: tuple[Tensor, Tensor]
) -> None:
    """Set the mean of each row that was due in a round to that over the sites, in place.

    `told`: of `told_by`. A site's own means are those of now: rows whose gradient came back while
    the exchange was under way are not scaled to what they were before. Within a row moments keep
    their proportions; one without, or with less than 2^-60, gets the others' mean in every place.
    Rows of which the others know nothing stay as they are.
    """
    weights = second.weights
    others, number = (each.to(weights.device) for each in told)
    own = torch.zeros_like(others)
    due = list(_due(second, layout, round_))
    for place, rows in due:
        torch.mean(rows, 1, out=own[place : place + len(rows)])
    # Of all rows together: a fragment has many tensors, of few rows each that are due.
    known = (own > 0) & (own >= SMALLEST * weights)
    mean = (others * weights + torch.where(known, own, 0.0)) / (number + known).clamp_(min=1)
    told_of = number > 0
    factor = torch.where(told_of & known, mean / own, 1.0)[:, None]
    replaced = (told_of & ~known)[:, None]
    some_replaced = bool(replaced.any())
    for place, rows in due:
        here = slice(place, place + len(rows))
        rows.mul_(factor[here])
        if some_replaced:
            rows.copy_(torch.where(replaced[here], mean[here, None], rows))


def _due(second: SecondMoments, layout: Layout, round_: int) -> Iterator[tuple[int, Tensor]]:
    """(place among what is due, the rows [n, columns] themselves) of every tensor with moments."""
    place = 0
    for name, count in zip(layout.names, due_counts(layout.shapes), strict=True):
        if count and name in second.live:
            tensor = second.live[name]
            start = (round_ - second.first_rows.get(name, 0)) % PERIOD
            yield place, tensor.view(-1, tensor.shape[-1])[start::PERIOD]
        place += count
