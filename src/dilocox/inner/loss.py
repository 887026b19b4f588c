"""The loss of a micro-batch, without fp32 copies of all of its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

AT_ONCE = 2**24
"""Logits whose loss is computed at once."""
COPIES = 3
"""fp32 buffers of that size which live in the backward pass: log-softmax, and the gradients of
it and of the logits."""


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 of logits [b, L, V] (any dtype) against labels int64 [b, L].

    Of many logits it is computed token by token, in the forward pass and again in the backward
    pass: to the bit what it is at once, but all that lives is the logits and their gradient.
    """
    rows, targets = logits.flatten(0, -2), labels.flatten()
    if rows.numel() <= AT_ONCE:
        return F.cross_entropy(rows.float(), targets)
    likelihoods: Tensor = _Likelihoods.apply(rows, targets)  # type: ignore[no-untyped-call]
    # Not `mean`: cross_entropy sums in this order, and leaves out the same labels (those below 0).
    return F.nll_loss(likelihoods.unsqueeze(1), targets.clamp(max=0))


def loss_bytes(logits: int, width: int) -> int:
    """What `mean_cross_entropy` of so many logits of `width` bytes holds at its peak, with them.

    In the backward pass. At once, the logits themselves are gone by then.
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
    """Tokens whose logits are taken at a time."""
    return max(1, AT_ONCE // logits.shape[1])
