"""The loss gate: measures how one contribution alone changes the held-out loss.

A rank that holds the whole model computes the loss with the contribution applied (`Gate`). With
several ranks per site, no rank can do that. Each rank then multiplies its part of the contribution
by the gradient of the held-out loss (`GradientProbe`), and the coordinator adds the parts.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.coordinator.protocol.verdicts import CAP, MICRO, WHOLE, RankOpinion
from dilocox.outer.layout import Layout

_LOSS = "/loss"
"""Name of the loss among a probe's tensors; no parameter has a name like it."""
Loss = Callable[[Mapping[str, Tensor]], float]
"""Maps a whole model (full name to fp32) to its held-out loss in nats."""


class Gate:
    """Computes held-out losses in a second copy of the model, beside training. Thread-safe: one
    loss at a time."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._one_at_a_time = threading.Lock()
        self._copies: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        """The newest copy of each anchor, by full name, while a probe has the copy."""

    def probe(self, anchors: Mapping[str, Tensor], layout: Layout) -> GateProbe:
        """Return a probe for an exchange of the fragment of `layout`.

        `anchors` (full name to fp32, all of the model) are copied to host memory. Probes share the
        copies of anchors that have not changed between them, so nothing may write to a copy.
        """
        copies = {name: self._copy(name, each.detach()) for name, each in anchors.items()}
        return GateProbe(self, copies, layout)

    def _copy(self, name: str, anchor: Tensor) -> Tensor:
        """Return the newest copy of an anchor, if the copy has the same bits; else a new copy."""
        newest, here = self._copies.get(name), anchor.cpu()
        if newest is not None and _same_bits(newest, here):
            return newest
        # The copy of a GPU's tensor is new already.
        copy = here.clone() if anchor.device.type == "cpu" else here
        self._copies[name] = copy
        return copy

    def again(
        self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], layout: Layout
    ) -> GateProbe:
        """Rebuild a probe from its `GateProbe.tensors`.

        `anchors` must equal the `anchors` that were passed to `GateProbe.tensors`.
        """
        return self.probe({**anchors, **tensors}, layout)

    def loss(self, tensors: Mapping[str, Tensor]) -> float:
        """Return the held-out loss, in nats, of a whole model (full name to fp32)."""
        with self._one_at_a_time:
            return self._loss(tensors)


@dataclass(frozen=True)
class GateProbe:
    """Probe of a `Gate`: the anchors of the whole model as they were at one boundary."""

    gate: Gate
    anchors: Mapping[str, Tensor]
    """All anchors of the model: full name to fp32 on the CPU. Other probes may share tensors."""
    layout: Layout

    def tensors(self, anchors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the probe's anchors that differ from the present `anchors`; see `Gate.again`."""
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
        """Return the opinions `found` with the loss at the anchors and each contribution's gain.

        The gain is the loss at the anchors less the loss at anchor − sent / w, a whole step along
        the contribution. Shares in an opinion reduce `sent` first. See `Probe.opinions` for the
        arguments.
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
    """Held-out loss, in nats, near the anchors of one boundary, and this rank's part of its
    gradient."""

    loss: float
    gradients: Mapping[str, Tensor]
    """Gradient of the held-out loss for this rank's trained tensors in the fragments of the
    boundary: full name to fp32 on the CPU."""

    @classmethod
    def again(cls, tensors: Mapping[str, Tensor], layout: Layout) -> SlopeProbe:
        """Rebuild a probe from its `SlopeProbe.tensors`."""
        gradients = {name: each for name, each in tensors.items() if name != _LOSS}
        return cls(float(tensors[_LOSS]), gradients).probe(layout)

    def probe(self, layout: Layout) -> SlopeProbe:
        """Return a probe for an exchange of the fragment of `layout`."""
        known = {name: self.gradients[name] for name in layout.names if name in self.gradients}
        return SlopeProbe(GradientProbe(self.loss, known), layout)


@dataclass(frozen=True)
class SlopeProbe:
    """Probe by gradient: held-out loss and gradient, for one fragment."""

    slope: GradientProbe
    layout: Layout

    def tensors(self, anchors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return loss (fp64) and gradients by name; see `GradientProbe.again`.

        The result does not depend on `anchors`.
        """
        loss = torch.tensor(self.slope.loss, dtype=torch.float64)
        return {_LOSS: loss, **self.slope.gradients}

    def opinions(
        self,
        sent: Mapping[str, Tensor],
        found: Mapping[str, RankOpinion],
        weights: Mapping[str, float],
    ) -> dict[str, RankOpinion]:
        """Return the opinions `found` with the loss and this rank's part of each gain.

        The gain is a first-order estimate: the inner product of the gradient and sent / w. Shares
        in an opinion reduce `sent` first. See `Probe.opinions` for the arguments.
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
    """Yield (full name, decoded contribution, factor) of each tensor.

    The factor (share / w) turns the contribution into the pseudo-gradient that would count.
    """
    shares = opinion.shares
    for number, (name, view) in enumerate(layout.views(sent).items()):
        share = shares[number if len(shares) > 1 else 0] / WHOLE if shares else 1.0
        yield name, view, share / weight


def _told(opinion: RankOpinion, gain: float, loss: float) -> RankOpinion:
    return opinion.model_copy(update={"gain": _micro(gain), "loss": max(0, _micro(loss))})


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if two fp32 tensors agree bit for bit. Zeros of different sign differ."""
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def _micro(value: float) -> int:
    if math.isnan(value):
        return -CAP
    return int(max(-CAP, min(CAP, round(value * MICRO) if math.isfinite(value) else value)))
