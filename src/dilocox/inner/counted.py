"""Counted labels: the loss of a batch of which some tokens count and others do not.

The loss is the sum of the cross-entropies of counted labels, divided by the counted labels of the
whole batch: of all micro-batches, shards and replicas. A mean of the means of micro-batches would
give the few labels of one micro-batch more weight than the many of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilocox.inner.columns import ColumnLoss, labels_of, with_labels

OwnLoss = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
"""(logits [b, L, V], labels int64 [b, L]) -> mean over the micro-batch, or (sum, count)."""


@dataclass(frozen=True)
class CountedLabels:
    """Counts and positions of a batch in which some labels do not count, or whose rows hold several
    documents."""

    labels: int
    """Counted labels of the whole batch of the site: of all its shards and replicas."""
    divisor: float
    """Divisor of the sum of the losses. It differs from `labels` if gradients are averaged over
    sites: the divisor is then the site's share of the counted labels of all sites."""
    positions: Tensor | None = None
    """int64 [b, L]: position of each token in its document, for this shard's rows. None: each row
    is one sequence."""

    @property
    def stretch(self) -> float:
        """Mean loss over this site's labels, in units of the loss that is trained on."""
        return self.divisor / self.labels


def on_device(counted: CountedLabels | None, device: torch.device) -> CountedLabels | None:
    """Return `counted` with its positions on `device`. The host does not wait for the copy."""
    if counted is None or counted.positions is None:
        return counted
    return replace(counted, positions=counted.positions.to(device, non_blocking=True))


def arguments(counted: CountedLabels | None) -> dict[str, Tensor]:
    """Return what chunks get beside tokens or hidden states: the positions, if there are any."""
    if counted is None or counted.positions is None:
        return {}
    return {"positions": counted.positions}


def mean_of(found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss, fp32, of what a user's loss gave: a mean, or (sum, count)."""
    if isinstance(found, tuple):
        total, count = found
        return total.float() / count
    return found.float()


class MicroBatchLoss:
    """Calls a user's loss for micro-batches, and keeps the counts that it returns."""

    def __init__(self, loss: OwnLoss) -> None:
        self._loss = loss
        self._counts: list[Tensor] = []
        self._figures: list[Tensor] = []
        self._counts_known = isinstance(loss, ColumnLoss) and loss.counts_known
        self.figure_names = loss.figure_names if isinstance(loss, ColumnLoss) else ()
        """Names of the figures that an evaluation gives beside the loss."""

    def __call__(
        self, logits: Tensor, targets: Tensor, whole: float, scale: float | None
    ) -> Tensor:
        """Return the micro-batch's part of the batch's loss, an fp32 scalar.

        A loss that returns (sum, count) gives its sum; `take_count` gives the divisor.

        Args:
            logits: [b, L, V].
            targets: labels int64 [b, L], or these with columns, see `dilocox.inner.columns`.
            whole: micro-batches of the batch, by which a mean is divided.
            scale: factor of a sum over counted labels; None: all labels count.
        """
        if scale is None:
            found = self._loss(logits, targets)
            if isinstance(found, tuple):
                return self._sum(*found)
            return found.float() / whole
        if self._counts_known:
            found = self._loss(logits, targets)
            assert isinstance(found, tuple)
            return found[0].float() * scale
        labels = labels_of(targets)
        counted = (labels >= 0).sum()
        # A mean over no label is NaN. So a micro-batch without counted labels gets one, and its
        # loss is multiplied by 0.
        first = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
        first.view(-1)[:1] = True
        labels = torch.where(first & (counted == 0), 0, labels)
        found = self._loss(logits, with_labels(targets, labels))
        if isinstance(found, tuple):
            total, count = found
            return self._sum(
                torch.where(counted == 0, total * 0, total),
                torch.where(counted == 0, 0, torch.as_tensor(count, device=logits.device)),
            )
        return found.float() * (counted * scale)

    def take_count(self, device: torch.device) -> Tensor:
        """Return the sum of the counts since the last call, fp32 scalar; 0 without any."""
        counts, self._counts = self._counts, []
        if not counts:
            return torch.zeros((), dtype=torch.float32, device=device)
        return torch.stack(counts).sum().float()

    def measure(self, logits: Tensor, targets: Tensor) -> None:
        """Add the figures of a micro-batch; arguments as for a call."""
        if isinstance(self._loss, ColumnLoss) and self.figure_names:
            self._figures.append(self._loss.measure(logits, targets))

    def take_figures(self, device: torch.device) -> Tensor:
        """Return the sums of the figures since the last call, fp32 [figures]."""
        found, self._figures = self._figures, []
        if not found:
            return torch.zeros(len(self.figure_names), dtype=torch.float32, device=device)
        return torch.stack(found).sum(0)

    def _sum(self, total: Tensor, count: Tensor | float) -> Tensor:
        self._counts.append(torch.as_tensor(count, device=total.device).detach().float())
        return total.float()
