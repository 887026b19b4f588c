"""Muon: SGD with momentum whose updates are orthonormalised, for matrices with sharded rows.

The update of a matrix W is the polar factor of its Nesterov momentum, which Newton-Schulz
iterations approximate (K. Jordan, "Muon: An optimizer for hidden layers in neural networks"). The
update is scaled by 0.2 sqrt(max(rows, columns)), to the size of AdamW's updates. So learning rate
and weight decay are the same for both ("Muon is Scalable for LLM Training", arXiv 2502.16982,
§2.2).

`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` computes the same. This implementation
processes many matrices at a time, supports sharded matrices, and skips a step without waiting for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2
_BATCH_ELEMENTS = 2**25
"""Elements that a rank orthonormalises at a time. This is enough for small matrices to share a
kernel, and few enough for intermediates to be small beside the model."""


def orthonormalise(matrices: Tensor) -> Tensor:
    """Return `matrices` [n, R, C] with singular values brought to about 1 (0.7 to 1.2).

    The computation is in the tensor's own dtype; bf16 is enough for training. A matrix of zeros
    stays zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def update_scale(rows: int, columns: int) -> float:
    """Return the factor that gives an orthonormal matrix the RMS of an update of AdamW."""
    return _RMS_OF_ADAMW * math.sqrt(max(rows, columns))


def gather_matrices(shards: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Return whole matrices [m, R, C], gathered from each rank's rows `shards` [n, r, C].

    Rank k gets the m = ceil(n / ranks) matrices from number k * m on, so that each matrix is
    orthonormalised once. Matrices beyond the n-th are zero. R is `rows`; r is the number of rows
    that `Tensor.chunk` gives to the rank, possibly 0. Collective over `group`.
    """
    count, own, columns = shards.shape
    ranks = group.size()
    each, most = -(-count // ranks), -(-rows // ranks)
    sent = shards.new_zeros(ranks * each, most, columns)
    sent[:count, :own] = shards
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    parts = got.view(ranks, each, most, columns).transpose(0, 1)
    return parts.reshape(each, ranks * most, columns)[:, :rows]


def scatter_matrices(matrices: Tensor, count: int, own: int, group: dist.ProcessGroup) -> Tensor:
    """Undo `gather_matrices`: return this rank's rows [n, r, C], n = `count`, r = `own`.

    Collective over `group`.
    """
    each, rows, columns = matrices.shape
    ranks = group.size()
    most = -(-rows // ranks)
    padded = matrices.new_zeros(each, ranks * most, columns)
    padded[:, :rows] = matrices
    sent = padded.view(each, ranks, most, columns).transpose(0, 1).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got.view(ranks * each, most, columns)[:count, :own]


@dataclass(frozen=True)
class _Batch:
    """Matrices of one shape that are updated together."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    """Shape of a whole matrix."""
    parameters: tuple[nn.Parameter, ...]
    momentum: Tensor
    """fp32 [n, r, C]; r is the number of the rank's own rows."""


class Muon:
    """Muon over local rows of matrices, fp32, with decoupled weight decay.

    Args:
        parameters: local tensors [r, C] by name, in the same order on all ranks of `group`.
        shapes: shapes [R, C] of the whole matrices by name.
        momentum: factor of the momentum.
        weight_decay: decoupled weight decay.
        precision: dtype in which updates are orthonormalised.
        group: ranks that share the rows, split as by `Tensor.chunk`. None means that every rank has
            whole matrices.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, Sequence[int]],
        *,
        momentum: float,
        weight_decay: float,
        precision: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._precision = precision
        self._group = group
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name in parameters:
            rows, columns = shapes[name]
            by_shape.setdefault((rows, columns), []).append(name)
        ranks = 1 if group is None else group.size()
        self._batches = [
            _batch(names[first : first + size], shape, parameters)
            for shape, names in by_shape.items()
            for size in [max(1, _BATCH_ELEMENTS // max(1, math.prod(shape))) * ranks]
            for first in range(0, len(names), size)
        ]

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Take one step with gradients / `divisor`; change nothing if `skip` is 1.

        `divisor` and `skip` are fp32 scalars on the parameters' device. Collective over the group.
        """
        skipped = skip.bool()
        kept = torch.where(skipped, 1.0, 1 - learning_rate * self._weight_decay)
        for batch in self._batches:
            gradient = torch.stack([_gradient(p) for p in batch.parameters]).div_(divisor)
            momentum = batch.momentum.lerp(gradient, 1 - self._momentum)
            update = self._orthonormal(gradient.lerp_(momentum, self._momentum), batch.shape[0])
            # If a gradient is not finite, so are these results; `skip` then discards them.
            torch.where(skipped, batch.momentum, momentum, out=batch.momentum)
            rate = learning_rate * update_scale(*batch.shape)
            _update(batch.parameters, update.masked_fill_(skipped, 0.0), kept, rate)

    def _orthonormal(self, update: Tensor, rows: int) -> Tensor:
        update = update.to(self._precision)
        if self._group is None:
            return orthonormalise(update)
        count, own, _ = update.shape
        whole = gather_matrices(update, rows, self._group)
        return scatter_matrices(orthonormalise(whole), count, own, self._group)

    def momenta(self) -> dict[str, Tensor]:
        """Return the live momentum by name: fp32, local shape."""
        return {
            name: momentum
            for batch in self._batches
            for name, momentum in zip(batch.names, batch.momentum, strict=True)
        }


def _batch(
    names: Sequence[str], shape: tuple[int, int], parameters: Mapping[str, nn.Parameter]
) -> _Batch:
    held = tuple(parameters[name] for name in names)
    momentum = torch.zeros_like(torch.stack([parameter.detach() for parameter in held]))
    return _Batch(tuple(names), shape, held, momentum)


def _update(parameters: Sequence[nn.Parameter], update: Tensor, kept: Tensor, rate: float) -> None:
    """Multiply `parameters` by `kept`, an fp32 scalar; subtract `rate` times `update` [n, r, C].

    The change is in place. With `kept` 1 and an `update` of zeros all bits stay the same. So a step
    can be skipped without a copy of the parameters, and without waiting for the device.
    """
    if update.device.type == "cuda":
        # One kernel for many matrices needs one dtype and one order in memory.
        update = update.to(parameters[0].dtype, memory_format=torch.contiguous_format)
    torch._foreach_mul_(list(parameters), kept)
    torch._foreach_add_(list(parameters), update.unbind(), alpha=-rate)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
