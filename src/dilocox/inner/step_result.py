"""Loss and gradient norm of an inner step, from one small gather among the site's ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilocox.utils.torch_internals import norms_of

_NO_TENSOR = -1.0


def status_of_rank(loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return float64 [3]: this rank's loss, the sum of squares of `gradients`, and an index.

    `gradients` are non-empty fp32 tensors. The index is that of the first gradient that is not
    finite; -1 if all are finite.
    """
    if not gradients:
        return torch.stack([loss.double(), loss.new_zeros((), dtype=torch.float64), _none(loss)])
    norms = torch.stack(norms_of(list(gradients))).double()
    bad = ~torch.isfinite(norms)
    first = torch.where(bad.any(), bad.int().argmax().double(), _none(loss))
    return torch.stack([loss.double(), norms.square().sum(), first])


def _none(like: Tensor) -> Tensor:
    return like.new_full((), _NO_TENSOR, dtype=torch.float64)


class StepResult:
    """Loss and gradient norm of one inner step of the site, equal on all of its ranks.

    The numbers are read from the device at the first access, so that the host does not wait for a
    GPU in every step.

    Args:
        statuses: `status_of_rank` of all ranks of a replica, float64 [ranks, 3] in rank order.
        shards: shards of each stage.
        last_stage: stage of the last chunk, whose ranks know the loss.
        names: names of the gradients of each rank, in the order of `status_of_rank`.
    """

    tokens: int | None = None
    """Tokens that a loop of the user's own reports. None: the tokens of the plan."""
    norm_known = True
    """Whether the gradient's norm was computed."""

    def __init__(
        self, statuses: Tensor, shards: int, last_stage: int, names: list[list[str]]
    ) -> None:
        self._statuses = statuses
        self._shards = shards
        self._last_stage = last_stage
        self._names = names
        first = last_stage * shards
        self._loss = statuses[first : first + shards, 0].sum() / shards
        self._norm = statuses[:, 1].sum().sqrt()
        self._read: tuple[float, float] | None = None

    def divisor_and_skip(self, clip: float, averaged: bool = False) -> tuple[Tensor, Tensor]:
        """Return (divisor of all gradients, 1 to skip the step else 0), fp32 scalars on the device.

        `clip`: largest norm of the gradient; 0 means no clipping. `averaged`: True if the gradients
        are a mean over the sites. All sites must then take the same step, so this site's loss does
        not decide on skipping.
        """
        bad = ~torch.isfinite(self._norm if averaged else self._norm + self._loss)
        divisor = torch.ones_like(self._norm)
        if clip > 0:
            divisor = torch.where(bad, divisor, torch.clamp(self._norm / clip, min=1.0))
        return divisor.float(), bad.float()

    @property
    def numbers(self) -> Tensor:
        """`loss` and `grad_norm`, float64 [2] on the device; does not wait for the device."""
        return torch.stack([self._loss, self._norm])

    @property
    def loss(self) -> float:
        """Mean loss over all tokens of the site's batch, before the step."""
        return self._values()[0]

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient over stages and shards, before clipping."""
        return self._values()[1]

    @property
    def finite(self) -> bool:
        """True if loss and norm are finite. If not, no optimizer step was taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def culprit(self) -> str | None:
        """Stage, shard and tensor of the first gradient that is not finite, in rank order.

        Names the loss if all gradients are finite. None if loss and gradients are finite.
        """
        if self.finite:
            return None
        for rank, (_, square, first) in enumerate(self._statuses.tolist()):
            stage, shard = divmod(rank, self._shards)
            if first >= 0:
                return f"stage {stage}, shard {shard}: gradient of {self._names[rank][int(first)]}"
            if not math.isfinite(square):
                return f"stage {stage}, shard {shard}: norm of all gradients"
        return f"stage {self._last_stage}: loss"

    def _values(self) -> tuple[float, float]:
        if self._read is None:
            loss, norm = self.numbers.tolist()
            self._read = (loss, norm)
        return self._read

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g})"


class ReportedStep(StepResult):
    """An inner step that a loop of the user's own has taken, by what the loop reports.

    The optimizer step was taken even if the loss is not finite. Only the loss decides whether the
    step counts as finite: with a gradient scaler, a norm of infinity belongs to a step that the
    scaler has left out, and the weights are sound. Weights that are not finite are found at the
    next boundary.
    """

    def __init__(
        self, loss: Tensor | float, grad_norm: Tensor | float | None, tokens: int | None
    ) -> None:
        """Note the report of one step.

        Args:
            loss: mean loss of the step, a scalar.
            grad_norm: norm of the gradient before clipping. None: it is not known.
            tokens: tokens of the step. None: as many as the plan has.
        """
        value = torch.as_tensor(loss).detach().double().reshape(())
        norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm).detach().double()
        nothing = torch.zeros_like(value)
        super().__init__(torch.stack([value, nothing, _none(value)])[None], 1, 0, [[]])
        self._norm = norm.to(value.device).reshape(())
        self.norm_known = grad_norm is not None
        self.tokens = tokens

    @property
    def finite(self) -> bool:
        """True if the loss is finite."""
        return math.isfinite(self.loss)
