"""Tries single changes of the run file, and returns those that make the run faster or better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.loss_model import loss_of, part_of
from dilocox.errors import DilocoxError
from dilocox.tools.planner.core_plan import CorePlan, Planned
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.predict import Prediction

FASTER, LESS_LOSS = 1.01, 0.002
"""Smallest gain with which an option is named: a factor in speed, or, at equal speed, less
predicted rise of the loss (0.002 is 0.2 percentage points)."""


@dataclass(frozen=True)
class Option:
    """One change of the run file that fits in memory, and the prediction with it."""

    key: str
    value: Any
    prediction: Prediction
    loss: float | None
    """Predicted rise of the loss over synchronous training; 0.1 is 10 %. None if the run exchanges
    gradients."""
    needed: int
    """Bytes that the fullest device needs."""
    available: int
    """Bytes that training may use of the fullest device."""

    @property
    def text(self) -> str:
        """The change as an argument of the command line, `--set KEY=VALUE`."""
        return f"--set {self.key}={self.value}"


def options(own: CorePlan, places: Sequence[GpuPlacement], planned: Planned) -> list[Option]:
    """Return every change that fits in memory and gains enough.

    Args:
        own: Plan of the run without a change.
        places: GPUs of each site.
        planned: Plans the run with changed keys.
    """
    found = []
    before = loss_rise(own.config, own.prediction.choice)
    for key, value in _changes(own.config, places):
        try:
            plan = planned({key: value}, None)
        except DilocoxError:
            continue  # the run file or the method does not allow this change
        loss = loss_rise(plan.config, plan.prediction.choice)
        speed = plan.prediction.tokens_per_second / own.prediction.tokens_per_second
        lower = before is not None and loss is not None and loss <= before - LESS_LOSS
        if own.keeps(plan) and (speed >= FASTER or (lower and speed >= 1 / FASTER)):
            found.append(Option(key, value, plan.prediction, loss, plan.needed, plan.available))
    return found


def _changes(config: RunConfig, places: Sequence[GpuPlacement]) -> Iterator[tuple[str, Any]]:
    if len(places) < 2:
        return
    if config.outer.device == "cpu" and not any(place.device.shared for place in places):
        yield "outer.device", "model"
    if config.outer.exchange == "gather" and len(places) > 2:
        yield "outer.exchange", "reduce"


def loss_rise(config: RunConfig, choice: Choice) -> float | None:
    """Return the predicted rise of the loss over synchronous training; 0.1 is 10 %.

    None if the run exchanges gradients.
    """
    if config.exchanges_gradients:
        return None
    share = choice.delay / choice.slots
    steps, part = config.total_steps, part_of(config)
    return loss_of(choice.inner_steps, choice.codec, share, steps, part)
