"""The loss of a micro-batch, computed without fp32 copies of all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

AT_ONCE = 2**24
"""Largest number of logits whose loss is computed at once."""
COPIES = 3
"""fp32 buffers of that size in the backward pass: log-softmax, its gradient, and the gradient of
the logits."""


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fp32 mean cross-entropy of logits [b, L, V] (any dtype), labels int64 [b, L].

    For more than `AT_ONCE` logits, the loss is computed for some tokens at a time, in the forward
    pass and again in the backward pass. The result has the same bits, but only the logits and their
    gradient stay in memory.
    """
    rows, targets = logits.flatten(0, -2), labels.flatten()
    if rows.numel() <= AT_ONCE:
        return F.cross_entropy(rows.float(), targets)
    likelihoods: Tensor = _Likelihoods.apply(rows, targets)  # type: ignore[no-untyped-call]
    # `nll_loss` instead of `mean`: it sums in the order of cross_entropy, and skips labels below 0.
    return F.nll_loss(likelihoods.unsqueeze(1), targets.clamp(max=0))


def sum_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the fp32 sum of the cross-entropies of all labels of 0 or above; 0 without any.

    Arguments and memory as for `mean_cross_entropy`.
    """
    rows, targets = logits.flatten(0, -2), labels.flatten()
    if rows.numel() <= AT_ONCE:
        return F.cross_entropy(rows.float(), targets, reduction="sum")
    likelihoods: Tensor = _Likelihoods.apply(rows, targets)  # type: ignore[no-untyped-call]
    return -likelihoods.sum()


def log_likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithm of the probability of each label, fp32 [b, L]; 0 for labels below 0.

    Arguments and memory as for `mean_cross_entropy`.
    """
    rows, targets = logits.flatten(0, -2), labels.flatten()
    known = targets.clamp(min=0)
    compute = _of_some if rows.numel() <= AT_ONCE else _Likelihoods.apply
    found: Tensor = compute(rows, known)
    return torch.where(targets >= 0, found, 0.0).view(labels.shape)


def loss_bytes(logits: int, width: int) -> int:
    """Return the bytes that `mean_cross_entropy` holds at its peak, logits included.

    The peak is in the backward pass. `logits`: number of logits; `width`: bytes of each. If the
    loss is computed at once, the logits themselves are freed by then.
    """
    if logits <= AT_ONCE:
        return COPIES * 4 * logits
    return 2 * width * logits + COPIES * 4 * AT_ONCE


class _Likelihoods(torch.autograd.Function):
    """Logarithm of the probability of each label: logits [n, V], labels [n] -> fp32 [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        count = _tokens(logits)
        return torch.cat(
            [
                _of_some(some, theirs)
                for some, theirs in zip(logits.split(count), labels.split(count), strict=True)
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        count = _tokens(logits)
        parts = (each.split(count) for each in (logits, labels, outer, gradient))
        for some, theirs, factor, into in zip(*parts, strict=True):
            with torch.enable_grad():
                values = some.detach().requires_grad_()
                found = _of_some(values, theirs)
            into.copy_(torch.autograd.grad(found, values, factor)[0])
        return gradient, None


def _of_some(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), labels, reduction="none")


def _tokens(logits: Tensor) -> int:
    """Return the number of tokens that are processed at a time."""
    return max(1, AT_ONCE // logits.shape[1])
