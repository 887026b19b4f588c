"""The gate: what a contribution alone does to the held-out loss."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from dilocox.outer.coordinator.verdict_messages import MICRO, WHOLE, Opinion
from dilocox.outer.fragments import Layout

Loss = Callable[[Mapping[str, Tensor]], float]
"""Whole model by full name, fp32, to held-out loss in nats."""
_CAP = 2**53


class Gate:
    """Computes losses, one at a time, in a model of its own beside training. Thread-safe."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._one_at_a_time = threading.Lock()

    def probe(self, anchors: Mapping[str, Tensor], layout: Layout) -> GateProbe:
        """For an exchange of the fragment of `layout`. `anchors` (full name to fp32) are copied."""
        copies = {name: tensor.detach().cpu().clone() for name, tensor in anchors.items()}
        return GateProbe(self, copies, layout)

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

    def opinions(
        self, sent: Mapping[str, Tensor], found: Mapping[str, Opinion], weights: Mapping[str, float]
    ) -> dict[str, Opinion]:
        """`found`, with the loss at the anchors and what each contribution of `sent` gains.

        What is tried is what would count: a pseudo-gradient clipped as the opinion says, taken
        whole.
        """
        before = self.gate.loss(self.anchors)
        told = {}
        for site, each in sent.items():
            tried = {**self.anchors}
            shares = found[site].shares
            for number, (name, view) in enumerate(self.layout.views(each).items()):
                share = shares[number if len(shares) > 1 else 0] / WHOLE if shares else 1.0
                tried[name] = self.anchors[name] - view.cpu() * (share / weights[site])
            gain = before - self.gate.loss(tried)
            told[site] = found[site].model_copy(
                update={"gain": _micro(gain), "loss": max(0, _micro(before))}
            )
        return told


def _micro(value: float) -> int:
    if math.isnan(value):
        return -_CAP
    return int(max(-_CAP, min(_CAP, round(value * MICRO) if math.isfinite(value) else value)))
