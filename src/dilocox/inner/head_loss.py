"""Head and loss together, computed over chunks of tokens, so that a micro-batch's logits never
exist all at once.

PyTorch 2.13 has `torch.nn.functional.linear_cross_entropy` (chunked form). That function has no
soft cap and no scale, and PyTorch 2.11 lacks it, so sites of one run would compute in two ways.
Both implementations compute the gradients in the forward pass and recompute nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilocox.inner.loss import AT_ONCE, COPIES, mean_cross_entropy, sum_cross_entropy

Logits = Callable[[Tensor], Tensor]
"""Maps hidden states [1, l, d] to logits [1, l, V]."""

CHUNK = {"cpu": 2**25, "cuda": 2**27}
"""Logits per chunk of the loss, by type of device. Only micro-batches of more than `AT_ONCE` logits
are cut into chunks. A GPU gets large chunks, and so large matrix products."""


class HeadLoss:
    """Mean cross-entropy of the model's logits, from the hidden states before the head.

    A micro-batch of at most `AT_ONCE` logits is computed whole. The result then has the bits of
    `mean_cross_entropy` of the model's output.

    Args:
        compiled: compile the loss of a chunk with `torch.compile`.
        summed: give the sum over the labels of 0 or above, not their mean.
    """

    def __init__(self, *, compiled: bool = False, summed: bool = False) -> None:
        self._summed = summed
        self._loss = _loss_and_gradient
        if compiled:
            # One kernel per shape: the result must not depend on shapes that came before.
            self._loss = torch.compile(_loss_and_gradient, dynamic=False)

    def __deepcopy__(self, _memo: object) -> HeadLoss:
        return self

    def __call__(
        self,
        logits: Logits,
        hidden: Tensor,
        labels: Tensor,
        parameters: Sequence[Tensor],
        vocabulary: int,
    ) -> Tensor:
        """Return the mean or sum over all tokens with a label of 0 or above, an fp32 scalar.

        Args:
            logits: applies the head: hidden states to logits.
            hidden: hidden states [b, l, d].
            labels: int64 [b, l].
            parameters: the head's parameters that `logits` uses; they get gradients.
            vocabulary: V.
        """
        if labels.numel() * vocabulary <= AT_ONCE:
            whole = sum_cross_entropy if self._summed else mean_cross_entropy
            return whole(logits(hidden), labels)
        count = chunk_tokens(labels.numel(), vocabulary, hidden.device.type)
        heads = head_tokens(labels.numel(), vocabulary, hidden.shape[-1], hidden.device.type)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        wanted = torch.is_grad_enabled()
        found: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
            self._loss, logits, _How(heads, count, wanted, self._summed), hidden, labels, *trained
        )
        return found


def logits_are_less(tokens: int, hidden: int) -> bool:
    """Return True if all logits take less memory than the head's gradient, summed over chunks.

    The head's matrix product is then computed once for all tokens, and only the loss in chunks.
    """
    return tokens <= hidden


def head_tokens(tokens: int, vocabulary: int, hidden: int, device: str) -> int:
    """Return the number of tokens of a micro-batch that the head processes at a time."""
    if tokens * vocabulary <= AT_ONCE or logits_are_less(tokens, hidden):
        return tokens
    return chunk_tokens(tokens, vocabulary, device)


def chunk_tokens(tokens: int, vocabulary: int, device: str) -> int:
    """Return the number of tokens of a chunk: at most `CHUNK` logits, in chunks of similar size."""
    most = max(1, CHUNK.get(device, AT_ONCE) // vocabulary)
    return -(-tokens // -(-tokens // most))


def head_loss_bytes(
    tokens: int, vocabulary: int, hidden: int, width: int, device: str = "cuda"
) -> int:
    """Return the bytes that head and loss of a micro-batch hold at their peak.

    A micro-batch of at most `AT_ONCE` logits holds the loss's copies of the logits in the backward
    pass. A larger micro-batch holds the gradient of the hidden states, one chunk's logits with
    their gradient, and the fp32 forms of one loss's logits. If the head's matrix product is
    computed in chunks, the fp32 sum of the head's gradient is added, and one chunk's part of this
    gradient. A CPU holds that part twice.

    Args:
        tokens: tokens of the micro-batch.
        vocabulary: V.
        hidden: size of a hidden state.
        width: bytes per value of the compute dtype.
        device: type of the device.
    """
    if tokens * vocabulary <= AT_ONCE:
        return COPIES * 4 * tokens * vocabulary
    count = chunk_tokens(tokens, vocabulary, device)
    heads = head_tokens(tokens, vocabulary, hidden, device)
    in_fp32 = (4 if width == 4 else 8) * count * vocabulary
    held, slopes = width * heads * vocabulary, width * tokens * hidden
    if heads > count:
        return 2 * held + in_fp32 + slopes
    if heads == tokens:
        return held + in_fp32 + slopes
    weights = vocabulary * hidden
    made = (2 if device == "cpu" else 1) * width * weights
    return max(held + in_fp32, 2 * held + made) + slopes + 4 * weights


class _How(NamedTuple):
    head_tokens: int
    """Tokens that the head processes at a time."""
    loss_tokens: int
    """Tokens that the loss processes at a time."""
    wanted: bool
    """Compute gradients."""
    summed: bool
    """Give the sum, not the mean."""


class _Chunked(torch.autograd.Function):
    """See `HeadLoss`. The forward pass computes gradients; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        logits: Logits,
        how: _How,
        hidden: Tensor,
        labels: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        count, few, wanted, summed = how
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        counted = (targets >= 0).float()
        weights = counted if summed else counted / counted.sum()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(rows) if wanted else None
        sums: list[Tensor] = []
        starts = range(0, len(rows), count)
        for start in starts:
            part = slice(start, start + count)
            with torch.enable_grad() if wanted else contextlib.nullcontext():
                some = rows[part].detach().requires_grad_(wanted)
                found = logits(some.unsqueeze(0)).squeeze(0)
            share, outer = _loss_in_parts(loss, found.detach(), targets[part], weights[part], few)
            total += share
            if gradient is not None:
                mine, *others = torch.autograd.grad(found, [some, *parameters], outer)
                gradient[part] = mine
                # With a single chunk no fp32 sum of gradients is needed.
                if start == 0:
                    sums = others if count >= len(rows) else [each.float() for each in others]
                else:
                    for gathered, other in zip(sums, others, strict=True):
                        gathered += other
                del mine, others
            del found, outer
        if gradient is not None:
            ctx.shape = hidden.shape
            kept = [each.to(p.dtype) for each, p in zip(sums, parameters, strict=True)]
            ctx.save_for_backward(gradient, *kept)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *sums = ctx.saved_tensors
        # Scale in fp32: a factor such as 1/3, rounded to bf16, would make all values wrong.
        hidden = (gradient.float() * outer).to(gradient.dtype).view(ctx.shape)
        return (
            *(None,) * 3,
            hidden,
            None,
            *((each.float() * outer).to(each.dtype) for each in sums),
        )


def _loss_in_parts(
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Call `loss`, `_loss_and_gradient` or its compiled form, for `count` tokens at a time."""
    if len(logits) <= count:
        return loss(logits, labels, weights)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    gradient = torch.empty_like(logits)
    for start in range(0, len(logits), count):
        part = slice(start, start + count)
        share, gradient[part] = loss(logits[part], labels[part], weights[part])
        total += share
    return total, gradient


def _loss_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross-entropies of logits [n, V], and its gradient in their dtype.

    `labels`: int64 [n], below 0 where the weight is 0. `weights`: fp32 [n].
    """
    targets = labels.clamp(min=0).unsqueeze(1)
    values = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -(values.gather(1, targets).squeeze(1) * weights).sum()
    values = values.exp_()
    values.scatter_(1, targets, values.gather(1, targets) - 1.0)
    return loss, values.mul_(weights.unsqueeze(1)).to(logits.dtype)
