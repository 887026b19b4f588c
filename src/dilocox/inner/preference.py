"""Direct preference optimisation, DPO (arXiv 2305.18290, equation 7): loss and figures of pairs."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dilocox.config.preference import ACCURACY, MARGIN, PAIR, REFERENCE, PreferenceSection
from dilocox.inner.columns import ColumnLoss
from dilocox.inner.loss import AT_ONCE, log_likelihoods, loss_bytes


def preference_loss(preference: PreferenceSection, columns: tuple[str, ...]) -> ColumnLoss:
    """Return the loss of a run on pairs, with the figures of pairs that evaluations give.

    `columns`: sorted names of the columns of the data, `pair` and `reference`.
    """
    return ColumnLoss(
        functools.partial(dpo_loss, **preference.model_dump()),
        columns,
        counts_known=True,
        figures=functools.partial(pair_figures, beta=preference.beta),
        figure_names=(ACCURACY, MARGIN),
    )


def dpo_loss(
    logits: Tensor,
    labels: Tensor,
    columns: Mapping[str, Tensor],
    *,
    beta: float,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all pairs, fp32, and the number of pairs.

    Each answer's log-probability is the sum over its counted labels. A pair's margin is beta times
    the difference, chosen less rejected, of model less reference. Its loss is
    -(1 - s) log sigmoid(margin) - s log sigmoid(-margin).

    Args:
        logits: [b, L, V].
        labels: int64 [b, L]; below 0 where a label does not count.
        columns: `pair` and `reference`, float32 [b, L] each, see `dilocox.config.preference`.
        beta: factor of the margin.
        label_smoothing: s.
    """
    margins, there = pair_margins(logits, labels, columns)
    margins = beta * margins
    losses = -(1 - label_smoothing) * F.logsigmoid(margins)
    losses = losses - label_smoothing * F.logsigmoid(-margins)
    return (losses * there).sum(), there.sum()


def pair_figures(
    logits: Tensor, labels: Tensor, columns: Mapping[str, Tensor], *, beta: float
) -> dict[str, Tensor]:
    """Return, summed over all pairs, fp32: how many are ranked right, and their margins.

    A pair is ranked right if its margin is above 0. Arguments as for `dpo_loss`; pairs that do not
    exist have the margin 0.
    """
    margins, there = pair_margins(logits, labels, columns)
    return {ACCURACY: ((margins > 0) & there).sum(), MARGIN: (beta * margins * there).sum()}


def pair_margins(
    logits: Tensor, labels: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the difference in log-probability ratio of every pair, and which pairs exist.

    Both have the shape [b, L // 2], for the pairs 1 to L // 2 of each row: fp32 and bool. Arguments
    as for `dpo_loss`.
    """
    ratios = log_likelihoods(logits, labels) - columns[REFERENCE]
    ratios = torch.where(labels >= 0, ratios, 0.0)
    pairs = columns[PAIR]
    numbers = torch.arange(1, labels.shape[1] // 2 + 1, device=labels.device).view(1, -1, 1)
    # A product of matrices has the same bits on every call; adding by index may not have.
    signs = (pairs.unsqueeze(1) == numbers).float() - (pairs.unsqueeze(1) == -numbers).float()
    return torch.bmm(signs, ratios.unsqueeze(2)).squeeze(2), (signs != 0).any(2)


def pair_loss_bytes(rows: int, length: int, vocabulary: int, width: int) -> int:
    """Return the bytes that `dpo_loss` of a micro-batch holds at its peak, logits included.

    In the forward pass it holds logits and, three times, the signs of `pair_margins`, one per row,
    pair and token; log-probabilities of the whole vocabulary, too, if they are computed at once.
    The backward pass begins with the signs, which are gone when that of the logits begins. `width`:
    bytes of a logit.
    """
    logits, signs = rows * length * vocabulary, 4 * rows * (length // 2) * length
    saved = 4 * logits if logits <= AT_ONCE else 0
    return max(width * logits + saved + 3 * signs, loss_bytes(logits, width))
