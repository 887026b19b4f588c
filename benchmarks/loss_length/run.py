"""One simulated run of the loss_length benchmark: copies train and exchange pseudo-gradients.

The inner optimizer is AdamW, applied to all copies at once. Codec, outer step and landing are the
engine's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.loss_length.model import (
    BATCH,
    LAYOUT,
    LENGTH,
    SITES,
    Text,
    first_weights,
    losses,
    views,
)
from dilocox.compression import compressor
from dilocox.compression.compressor import Part
from dilocox.compression.second_moments import PERIOD
from dilocox.coordinator.controller import loss_model
from dilocox.outer.outer_step import Rule, local_view, nesterov_step

CLIP, DECAY, BETAS, EPS = 1.0, 0.1, (0.9, 0.95), 1e-8
SYNCHRONOUS = "synchronous"
Moments = Literal["rows", "factored", "none"]
"""What sites share of second moments at a boundary. `rows`: as in the engine, the mean of each row,
once in `PERIOD` rounds. `factored`: means of all rows and columns; sites keep nothing else."""


@dataclass(frozen=True)
class Plan:
    """Rounds of `inner_steps` with `codec`.

    0 steps mean synchronous training: gradients are averaged after every step, and `codec` is
    `none`.
    """

    inner_steps: int
    codec: str

    @property
    def name(self) -> str:
        """Name of the plan in rows."""
        return f"H={self.inner_steps} {self.codec}" if self.inner_steps else SYNCHRONOUS

    @property
    def delay(self) -> int:
        """Steps after which a round lands: a quarter of the round."""
        return max(1, round(self.inner_steps / 4))


@dataclass(frozen=True)
class Outside:
    """Outer learning rate and momentum, residual decay and the residual's share in view."""

    gamma: float
    mu: float
    beta: float
    view: float

    @classmethod
    def of_table(cls, plan: Plan, steps: int) -> Outside:
        """Return the controller's values for a plan in a run of `steps` inner steps.

        Synchronous training gets values that change nothing.
        """
        if plan.inner_steps == 0:
            return cls(1.0, 0.0, 1.0, 0.0)
        asked = plan.inner_steps, plan.codec, steps
        return cls(
            *loss_model.outer_rates(*asked),
            loss_model.residual_decay(*asked),
            loss_model.residual_view(*asked),
        )


class Inner:
    """AdamW of all copies, with clipping, warm-up and a cosine schedule to a tenth of the rate."""

    def __init__(self, copies: int, rate: float, steps: int) -> None:
        self.first = torch.zeros(copies, LAYOUT.length)
        self.second = torch.zeros(copies, LAYOUT.length)
        self._rate, self._steps, self._taken = rate, steps, 0
        self._decay = torch.zeros(LAYOUT.length)
        for view in LAYOUT.views(self._decay).values():
            view.fill_(DECAY if view.dim() > 1 else 0.0)

    def step(self, flat: Tensor, gradients: Tensor) -> None:
        """Train one step of every copy, in place. Overwrites `gradients`."""
        norms = gradients.norm(dim=1, keepdim=True)
        gradients *= (CLIP / (norms + 1e-6)).clamp(max=1.0)
        self._taken += 1
        warm = max(1, self._steps // 16)
        done = max(0.0, (self._taken - warm) / max(1, self._steps - warm))
        rate = self._rate * min(1.0, self._taken / warm)
        rate *= 0.55 + 0.45 * math.cos(math.pi * done)
        self.first.lerp_(gradients, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradients, gradients, value=1 - BETAS[1])
        root = (self.second / (1 - BETAS[1] ** self._taken)).sqrt_().add_(EPS)
        flat.mul_(1 - rate * self._decay)
        flat.addcdiv_(self.first, root, value=-rate / (1 - BETAS[0] ** self._taken))

    def factor_moments(self) -> None:
        """Give all copies one second moment: per matrix, the product of row means and column means
        of the mean over copies, divided by the mean of all."""
        for second in views(self.second).values():
            if second.dim() > 2:
                mean = second.mean(0)
                rows, columns = mean.mean(-1, keepdim=True), mean.mean(-2, keepdim=True)
                second.copy_((rows * columns / mean.mean().clamp(min=1e-30)).expand_as(second))

    def share_moments(self, due: int) -> None:
        """Scale every `PERIOD`th row of second moments, from `due` on, to the mean over copies."""
        for second in views(self.second).values():
            if second.dim() > 2:
                rows = second[:, due::PERIOD]
                means = rows.mean(-1, keepdim=True)
                # A row without moments has nothing to scale.
                rows *= torch.where(means > 0, means.mean(0) / means, 1.0)


def train(
    text: Text,
    plan: Plan,
    rate: float,
    steps: int,
    seed: int,
    outside: Outside,
    moments: Moments = "rows",
) -> float:
    """Train, and return the held-out loss of the anchor after `steps` inner steps of every site."""
    draw = torch.Generator().manual_seed(seed)
    synchronous = plan.inner_steps == 0
    copies = 1 if synchronous else SITES
    live = first_weights(seed).repeat(copies, 1).requires_grad_()
    inner = Inner(copies, rate, steps)
    outer = None if synchronous else Outer(live.detach(), plan, steps, outside, moments)
    for taken in range(1, steps + 1):
        ids = text.batch(draw)
        if synchronous:
            ids = ids.view(1, SITES * BATCH, LENGTH + 1)
        (gradients,) = torch.autograd.grad(losses(live, ids).sum(), live)
        with torch.no_grad():
            inner.step(live, gradients)
            if outer is not None:
                outer.after(taken, live, inner)
    found = live.detach() if outer is None else outer.anchor[None]
    with torch.no_grad():
        pieces = text.held_out.view(SITES, 1, -1, LENGTH + 1)
        return sum(float(losses(found, piece)) for piece in pieces) / SITES


class Outer:
    """Anchor, momentum, residuals and the average in flight: one fragment, overlap `keep`."""

    def __init__(
        self, live: Tensor, plan: Plan, steps: int, outside: Outside, moments: Moments = "rows"
    ) -> None:
        self._moments = moments
        self.anchor = live[0].clone()
        self._momentum = torch.zeros_like(self.anchor)
        self._reference = live.clone()
        self._residual = torch.zeros_like(live)
        self._plan, self._steps, self._rounds = plan, steps, 0
        self._mean: Tensor | None = None
        self._part = whole_part(plan.codec)
        self._rule = Rule("keep", outside.gamma, outside.mu, residual=outside.view)
        self._decay = outside.beta

    def after(self, taken: int, live: Tensor, inner: Inner) -> None:
        """Do the landing and the boundary that are due after `taken` inner steps, or both at the
        end."""
        plan, last = self._plan, taken == self._steps
        since = taken % plan.inner_steps
        if self._mean is not None and (since == plan.delay % plan.inner_steps or last):
            self._land(live)
        if since == 0 or last:
            self._boundary(live, inner)
        if last:
            self._land(live)

    def _boundary(self, live: Tensor, inner: Inner) -> None:
        delta = self._reference - live
        self._reference.copy_(live)
        wanted = delta + self._decay * self._residual
        sent = torch.stack([self._through(each) for each in wanted])
        self._residual = wanted - sent
        self._mean = sent.mean(0)
        if self._moments == "rows":
            inner.share_moments(self._rounds % PERIOD)
        elif self._moments == "factored":
            inner.factor_moments()
        self._rounds += 1

    def _through(self, values: Tensor) -> Tensor:
        return self._part.decode(self._part.encode(values.contiguous()))

    def _land(self, live: Tensor) -> None:
        assert self._mean is not None
        rule = self._rule
        nesterov_step(self.anchor, self._momentum, self._mean, rule.learning_rate, rule.momentum)
        moved = live - self._reference
        live.copy_(local_view(rule, self.anchor, moved, None, self._residual))
        self._reference = live - moved
        self._mean = None


def whole_part(codec: str) -> Part:
    """Return the engine's codec of this name for all parameters at once."""
    found = compressor(codec, LAYOUT.geometry)
    return found.part(0, LAYOUT.length)


def reduction(plan: Plan) -> float:
    """Return the bytes of synchronous training over those that the plan sends to all other
    sites."""
    if plan.inner_steps == 0:
        return 1.0
    payload = whole_part(plan.codec).payload_bytes
    return 8 * LAYOUT.length * plan.inner_steps / SITES / payload
