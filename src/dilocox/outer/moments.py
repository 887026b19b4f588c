"""Second moments that sites share: their row means, a part of the rows with every exchange.

See `dilocox.compression.moments` for why, and for what travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dilocox.compression.moments import PERIOD, due_rows, from_bytes, row_counts, to_bytes
from dilocox.outer.fragments import Layout

SecondMoments = tuple[Mapping[str, Tensor], Tensor]
"""Those of a rank's inner optimizer, full name to live fp32 tensor of local shape, and the sum of
the weights in each of their averages, a fp32 scalar on their device: near 0 after a site's first
step, and 1 after some dozens. Sites compare and share them divided by it."""
Second = Callable[[], SecondMoments]


def row_means(second: SecondMoments, layout: Layout, round_: int) -> Tensor:
    """What this rank says of a fragment's rows that are due in a round: uint8 [due] on the CPU.

    Rows of tensors without second moments are 0.
    """
    moments, weights = second
    said = torch.zeros(due_rows(layout.geometry), device=weights.device)
    for name, first, rows in _due(layout, round_):
        if name in moments:
            means = _rows(moments[name])[rows].mean(1)
            said[first : first + len(means)] = means
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
    moments, weights = second
    wanted_by_all = means.to(weights.device) * weights
    for name, first, rows in _due(layout, round_):
        if name in moments:
            due = _rows(moments[name])[rows]
            own = due.mean(1)
            wanted = wanted_by_all[first : first + len(own)]
            factors = torch.where((own > 0) & (wanted > 0), wanted / own, 1.0)
            due.mul_(factors[:, None])


def _due(layout: Layout, round_: int) -> Iterator[tuple[str, int, slice]]:
    """(name, place among what is due, rows) of every tensor with rows that are due in a round."""
    place, before = 0, 0
    counts = row_counts(layout.shapes)
    for name, count in zip(layout.names, counts, strict=True):
        start = (round_ - before) % PERIOD
        if start < count:
            yield name, place, slice(start, count, PERIOD)
            place += -(-(count - start) // PERIOD)
        before += count


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])
