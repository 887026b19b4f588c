"""Targets: labels and, beside them, the columns of the data that a user's loss reads.

Labels and columns are one int64 tensor. So pipeline schedules cut it into micro-batches, and
replicas send it, as they do with labels alone. A column is in it as the bits of its numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def labels_of(targets: Tensor) -> Tensor:
    """Return the labels, int64 [b, L], of targets [b, L] or [b, 1 + columns, L]."""
    return targets if targets.dim() == 2 else targets[:, 0]


def with_labels(targets: Tensor, labels: Tensor) -> Tensor:
    """Return `targets` with other labels, int64 [b, L]."""
    if targets.dim() == 2:
        return labels
    return torch.cat([labels.unsqueeze(1), targets[:, 1:]], dim=1)


def columns_of(targets: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the columns of targets by name, float32 [b, L] each.

    `names`: in the order of the targets, which is that of sorted names. Raises `ValueError` if the
    targets have more or fewer columns.
    """
    bits = [] if targets.dim() == 2 else targets[:, 1:].unbind(1)
    found = zip(names, bits, strict=True)
    return {name: each.to(torch.int32).view(torch.float32) for name, each in found}


def plain_targets(labels: Tensor, columns: int) -> Tensor:
    """Return targets of these labels, int64 [b, L], with 1 in every one of `columns` columns."""
    if not columns:
        return labels
    one = torch.ones(labels.shape, dtype=torch.float32).view(torch.int32).to(torch.int64)
    return torch.stack([labels, *[one] * columns], dim=1)


def takes_columns(loss: Callable[..., Any]) -> bool:
    """Return whether a user's loss has a parameter named `columns`."""
    try:
        return "columns" in inspect.signature(loss).parameters
    except ValueError:  # a builtin without a signature
        return False


@dataclass(frozen=True)
class ColumnLoss:
    """A user's loss that reads columns, as a loss of logits and targets."""

    loss: Callable[..., Tensor | tuple[Tensor, Tensor]]
    """(logits [b, L, V], labels int64 [b, L], columns={name: float32 [b, L]}) -> as `OwnLoss`."""
    names: tuple[str, ...]
    """Names of the columns, sorted."""
    counts_known: bool = False
    """True if the loss gives (sum, count), and the counts are those of `CountedLabels`."""
    figures: Callable[..., Mapping[str, Tensor]] | None = None
    """Of the arguments of `loss`: further figures of an evaluation by name, summed as the loss is.
    Only with `counts_known`."""
    figure_names: tuple[str, ...] = ()
    """Names of `figures`."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return what the user's loss gives for a micro-batch."""
        columns = columns_of(targets, self.names)
        return self.loss(logits, labels_of(targets), columns=columns)

    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sums of `figures` for a micro-batch, fp32 in the order of their names."""
        if self.figures is None:
            return torch.zeros(0, dtype=torch.float32, device=logits.device)
        columns = columns_of(targets, self.names)
        found = self.figures(logits, labels_of(targets), columns=columns)
        return torch.stack([found[name].float() for name in self.figure_names])
