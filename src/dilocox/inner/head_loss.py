"""Head and loss together, over some tokens at a time: all logits of a micro-batch never exist.

PyTorch 2.13 has `torch.nn.functional.linear_cross_entropy` (chunked form). That function has no
soft cap and no scale, and PyTorch 2.11 lacks it, so sites of one run would compute in two ways.
Both implementations compute the gradients in the forward pass and recompute nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilocox.inner.loss import AT_ONCE, COPIES, mean_cross_entropy

Logits = Callable[[Tensor], Tensor]
"""Hidden states [1, l, d] -> logits [1, l, V]."""

CHUNK = {"cpu": 2**25, "cuda": 2**27}
"""Logits per chunk of the loss, by type of device. Only micro-batches of more than `AT_ONCE` logits
are cut into chunks. A GPU gets large chunks, and so large matrix products."""


class HeadLoss:
    """Mean cross-entropy of the model's logits, from the hidden states before the head.

    A micro-batch of at most `AT_ONCE` logits is computed whole. The result then has the bits of
    `mean_cross_entropy` of the model's output. `compiled`: `torch.compile` makes the kernels of the
    loss of a chunk.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self._loss = _loss_and_gradient
        if compiled:
            # A kernel for each shape: what a kernel computes may not hang on what came before it.
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
        """Mean over all tokens with a label of 0 or above, an fp32 scalar.

        `hidden`: [b, l, d]. `labels`: int64 [b, l]. `parameters`: of the head, those that `logits`
        uses; they get gradients. `vocabulary`: V.
        """
        if labels.numel() * vocabulary <= AT_ONCE:
            return mean_cross_entropy(logits(hidden), labels)
        count = chunk_tokens(labels.numel(), vocabulary, hidden.device.type)
        heads = head_tokens(labels.numel(), vocabulary, hidden.shape[-1], hidden.device.type)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        wanted = torch.is_grad_enabled()
        found: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
            self._loss, logits, (heads, count), wanted, hidden, labels, *trained
        )
        return found


def logits_are_less(tokens: int, hidden: int) -> bool:
    """Whether all logits take less memory than the head's gradient, summed over chunks.

    In this case the head is multiplied once, and only the loss is computed in chunks.
    """
    return tokens <= hidden


def head_tokens(tokens: int, vocabulary: int, hidden: int, device: str) -> int:
    """Tokens of a micro-batch that the head is multiplied with at a time."""
    if tokens * vocabulary <= AT_ONCE or logits_are_less(tokens, hidden):
        return tokens
    return chunk_tokens(tokens, vocabulary, device)


def chunk_tokens(tokens: int, vocabulary: int, device: str) -> int:
    """Tokens of a chunk: as many as `CHUNK` logits hold at most, in chunks of nearly equal size."""
    most = max(1, CHUNK.get(device, AT_ONCE) // vocabulary)
    return -(-tokens // -(-tokens // most))


def head_loss_bytes(
    tokens: int, vocabulary: int, hidden: int, width: int, device: str = "cuda"
) -> int:
    """Bytes that head and loss of a micro-batch hold at their peak.

    `width`: bytes per value of the compute dtype. A micro-batch of at most `AT_ONCE` logits holds
    the loss's copies of the logits in the backward pass. A larger one holds the gradient of the
    hidden states, one chunk's logits with their gradient, and the fp32 forms of one loss's logits.
    If the head is multiplied more than once, the fp32 sum of the head's gradient adds to these, and
    one chunk's gradient. A CPU makes the latter twice.
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


class _Chunked(torch.autograd.Function):
    """See `HeadLoss`. Gradients are found in the forward pass, scaled in the backward pass.

    `counts`: tokens that the head is multiplied with at a time, and those of a loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        logits: Logits,
        counts: tuple[int, int],
        wanted: bool,
        hidden: Tensor,
        labels: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        count, few = counts
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        counted = (targets >= 0).float()
        weights = counted / counted.sum()
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
                # One chunk's gradients are all: no sum in fp32 is needed beside them.
                if start == 0:
                    sums = others if count >= len(rows) else [each.float() for each in others]
                else:
                    for summed, other in zip(sums, others, strict=True):
                        summed += other
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
        # In fp32: a share such as 1/3 of a micro-batch, rounded to bf16, is wrong in all values.
        hidden = (gradient.float() * outer).to(gradient.dtype).view(ctx.shape)
        return (
            *(None,) * 4,
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
    """`_loss_and_gradient` (or its compiled form) of `count` tokens after the other."""
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
    """Weighted sum of the cross-entropies of logits [n, V], and its gradient in their dtype.

    `labels`: int64 [n], below 0 where the weight is 0. `weights`: fp32 [n].
    """
    targets = labels.clamp(min=0).unsqueeze(1)
    values = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -(values.gather(1, targets).squeeze(1) * weights).sum()
    values = values.exp_()
    values.scatter_(1, targets, values.gather(1, targets) - 1.0)
    return loss, values.mul_(weights.unsqueeze(1)).to(logits.dtype)
