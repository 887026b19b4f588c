"""Second moments that sites share: their row means, a part of the rows with every exchange.

See `dilocox.compression.moments` for why, and for what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dilocox.compression.moments import (
    PERIOD,
    SecondMoments,
    due_rows,
    from_bytes,
    row_counts,
    to_bytes,
)
from dilocox.outer.fragments import Layout

Second = Callable[[], SecondMoments]
"""Gives a rank's, as they are now."""


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


def shared_means(carried: Sequence[Tensor]) -> Tensor:
    """fp32 [due]: the mean of every row over the sites that have one, 0 where none has.

    `carried`: uint8 [due] of each site that counts, in the order of the contribution set.
    """
    told = torch.stack([from_bytes(each) for each in carried])
    return told.sum(0) / (told > 0).sum(0).clamp_(min=1)


def take_means(second: SecondMoments, layout: Layout, round_: int, means: Tensor) -> None:
    """Scale the rows that were due in a round, in place, to these `means` (fp32 [due]).

    What has no moments yet, and rows of which no site knows any, stay as they are.
    """
    wanted_by_all = means.to(second.weights.device) * second.weights
    for place, rows in _due(second, layout, round_):
        own, wanted = rows.mean(1), wanted_by_all[place : place + len(rows)]
        factors = torch.where((own > 0) & (wanted > 0), wanted / own, 1.0)
        rows.mul_(factors[:, None])


def _due(second: SecondMoments, layout: Layout, round_: int) -> Iterator[tuple[int, Tensor]]:
    """(place among what is due, the rows [n, columns] themselves) of every tensor with moments."""
    place = 0
    for name, count in zip(layout.names, row_counts(layout.shapes), strict=True):
        if count and name in second.live:
            tensor = second.live[name]
            start = (round_ - second.first_rows.get(name, 0)) % PERIOD
            yield place, tensor.view(-1, tensor.shape[-1])[start::PERIOD]
        place += -(-count // PERIOD)
