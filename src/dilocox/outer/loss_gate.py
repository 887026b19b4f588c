"""The gate: what a contribution alone does to the held-out loss.

A rank that holds the whole model tries it out (`Gate`). Of several ranks none can: there each
measures its part of the contribution along the gradient of the held-out loss (`GradientProbe`), and
the coordinator adds the parts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.coordinator.protocol.verdicts import CAP, MICRO, WHOLE, RankOpinion
from dilocox.outer.layout import Layout

_LOSS = "/loss"
"""No tensor has such a name."""
Loss = Callable[[Mapping[str, Tensor]], float]
"""Whole model by full name, fp32, to held-out loss in nats."""


class Gate:
    """Computes losses, one at a time, in a model of its own beside training. Thread-safe."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._one_at_a_time = threading.Lock()

    def probe(self, anchors: Mapping[str, Tensor], layout: Layout) -> GateProbe:
        """For an exchange of the fragment of `layout`. `anchors` (full name to fp32) are copied."""
        copies = {name: each.detach().to("cpu", copy=True) for name, each in anchors.items()}
        return GateProbe(self, copies, layout)

    def again(
        self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], layout: Layout
    ) -> GateProbe:
        """The probe that `GateProbe.tensors` were of, with the anchors that they were taken at."""
        return self.probe({**anchors, **tensors}, layout)

    def loss(self, tensors: Mapping[str, Tensor]) -> float:
        """Held-out loss of a whole model."""
        with self._one_at_a_time:
            return self._loss(tensors)


@dataclass(frozen=True)
class GateProbe:
    """The anchors as they were at one boundary."""

    gate: Gate
    anchors: Mapping[str, Tensor]
    layout: Layout

    def tensors(self, anchors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What makes it again where the anchors have become `anchors`; see `Gate.again`."""
        return {
            name: each
            for name, each in self.anchors.items()
            if not torch.equal(each, anchors[name].cpu())
        }

    def opinions(
        self,
        sent: Mapping[str, Tensor],
        found: Mapping[str, RankOpinion],
        weights: Mapping[str, float],
    ) -> dict[str, RankOpinion]:
        """`found`, with the loss at the anchors and what each contribution of `sent` gains.

        What is tried is what would count: a pseudo-gradient clipped as the opinion says, taken
        whole.
        """
        before = self.gate.loss(self.anchors)
        told = {}
        for site, each in sent.items():
            tried = {**self.anchors}
            for name, view, factor in _counted(self.layout, each, found[site], weights[site]):
                tried[name] = self.anchors[name] - view.cpu() * factor
            told[site] = _told(found[site], before - self.gate.loss(tried), before)
        return told


@dataclass(frozen=True)
class GradientProbe:
    """The held-out loss in nats near the anchors of one boundary, and some of its gradients."""

    loss: float
    gradients: Mapping[str, Tensor]
    """Full name to fp32 on the CPU: of what this rank trains of the fragments of the boundary."""

    @classmethod
    def again(cls, tensors: Mapping[str, Tensor], layout: Layout) -> SlopeProbe:
        """The probe that `SlopeProbe.tensors` were of."""
        gradients = {name: each for name, each in tensors.items() if name != _LOSS}
        return cls(float(tensors[_LOSS]), gradients).probe(layout)

    def probe(self, layout: Layout) -> SlopeProbe:
        """For an exchange of the fragment of `layout`."""
        known = {name: self.gradients[name] for name in layout.names if name in self.gradients}
        return SlopeProbe(GradientProbe(self.loss, known), layout)


@dataclass(frozen=True)
class SlopeProbe:
    """A slope, and the fragment that is exchanged."""

    slope: GradientProbe
    layout: Layout

    def tensors(self, anchors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What makes it again, whatever the anchors have become; see `GradientProbe.again`."""
        loss = torch.tensor(self.slope.loss, dtype=torch.float64)
        return {_LOSS: loss, **self.slope.gradients}

    def opinions(
        self,
        sent: Mapping[str, Tensor],
        found: Mapping[str, RankOpinion],
        weights: Mapping[str, float],
    ) -> dict[str, RankOpinion]:
        """`found`, with that loss and what this rank's part of each contribution of `sent` gains
        to first order: its inner product with the gradient, clipped as the opinion
        says and taken whole.
        """
        told = {}
        for site, each in sent.items():
            gain = 0.0
            for name, view, factor in _counted(self.layout, each, found[site], weights[site]):
                gradient = self.slope.gradients.get(name)
                if gradient is not None:
                    product = torch.sum(gradient * view.cpu(), dtype=torch.float64)
                    gain += factor * float(product)
            told[site] = _told(found[site], gain, self.slope.loss)
        return told


def _counted(
    layout: Layout, sent: Tensor, opinion: RankOpinion, weight: float
) -> Iterator[tuple[str, Tensor, float]]:
    """(full name, what was sent, factor to what would count of it) by tensor."""
    shares = opinion.shares
    for number, (name, view) in enumerate(layout.views(sent).items()):
        share = shares[number if len(shares) > 1 else 0] / WHOLE if shares else 1.0
        yield name, view, share / weight


def _told(opinion: RankOpinion, gain: float, loss: float) -> RankOpinion:
    return opinion.model_copy(update={"gain": _micro(gain), "loss": max(0, _micro(loss))})


def _micro(value: float) -> int:
    if math.isnan(value):
        return -CAP
    return int(max(-CAP, min(CAP, round(value * MICRO) if math.isfinite(value) else value)))
