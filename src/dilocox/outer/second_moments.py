"""Sharing of second moments between sites: every exchange carries the means of some rows.

`dilocox.compression.second_moments` gives the reason and the format.
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
"""Returns a rank's second moments as they are now."""


def none_held() -> SecondMoments:
    """Return empty second moments, for an inner optimizer without second moments."""
    return SecondMoments({}, torch.ones(()), {})


def row_means(second: SecondMoments, layout: Layout, round_: int) -> Tensor:
    """Return the row means of this rank for a fragment's rows that are due in `round_`.

    The result is uint8 [due] on the CPU. Rows of tensors without second moments are 0.
    """
    weights = second.weights
    said = torch.zeros(due_rows(layout.geometry), device=weights.device)
    for place, rows in _due(second, layout, round_):
        said[place : place + len(rows)] = rows.mean(1)
    # Before the first step moments and weights are zero: avoid 0 / 0.
    return to_bytes(torch.where(weights > 0, said / weights, 0.0)).cpu()


def told_by(carried: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Add up the row means of the other sites.

    Returns, for each due row, the sum of the means, fp32 [due], and the number of sites that have
    sent a mean, int64 [due]. `carried`: uint8 [due] of each other site of the contribution set, in
    the order of the set.
    """
    told = torch.stack([from_bytes(each) for each in carried])
    return told.sum(0), (told > 0).sum(0)


def take_means(
    second: SecondMoments, layout: Layout, round_: int, told: tuple[Tensor, Tensor]
) -> None:
    """Scale each row that was due in `round_`, in place, to the mean over the sites.

    Within a row, moments keep their proportions. A row whose own mean is zero or below 2^-60 takes
    the others' mean in every place. A row for which no other site has sent a mean stays unchanged.

    The own mean is taken now, not at the boundary. Otherwise a row whose gradient became non-zero
    while the exchange was in flight would be scaled back to its mean before.

    `told`: result of `told_by`.
    """
    weights = second.weights
    others, number = (each.to(weights.device) for each in told)
    own = torch.zeros_like(others)
    due = list(_due(second, layout, round_))
    for place, rows in due:
        torch.mean(rows, 1, out=own[place : place + len(rows)])
    # Compute for all rows together: a fragment has many tensors with few due rows each.
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
    """Yield (place, rows) of every tensor with second moments.

    `place` is the position of the tensor's first row among all due rows; `rows` is a view
    [n, columns] of the due rows.
    """
    place = 0
    for name, count in zip(layout.names, due_counts(layout.shapes), strict=True):
        if count and name in second.live:
            tensor = second.live[name]
            start = (round_ - second.first_rows.get(name, 0)) % PERIOD
            yield place, tensor.view(-1, tensor.shape[-1])[start::PERIOD]
        place += count
