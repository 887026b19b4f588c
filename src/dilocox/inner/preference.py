"""The loss of direct preference optimisation, DPO (arXiv 2305.18290, equation 7)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dilocox.config.preference import PAIR, REFERENCE
from dilocox.inner.loss import log_likelihoods


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
