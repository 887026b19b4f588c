"""Keys of the run file that a plan tries by itself, and what each of them buys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import Choice
from dilocox.coordinator.controller.loss_model import loss_of
from dilocox.errors import DilocoxError
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.predict import Prediction
from dilocox.tools.planner.variants import changed

FASTER, LESS_LOSS = 1.01, 0.002
"""What an option has to gain to be named: in speed as a factor, or in predicted loss as a share,
where it is as fast."""


@dataclass(frozen=True)
class Option:
    """One change of the run file that fits, and what becomes of the plan with it."""

    key: str
    value: Any
    prediction: Prediction
    loss: float | None
    """Predicted rise over synchronous training, 0.1 for 10 %. May be None."""
    needed: int
    """Bytes that the fullest device needs."""
    available: int
    """Bytes that training may use of it."""

    @property
    def text(self) -> str:
        """As `--set` takes it."""
        return f"--set {self.key}={self.value}"


def options(
    config: RunConfig,
    places: Sequence[GpuPlacement],
    own: Prediction,
    predicted: Callable[[RunConfig], Prediction],
    filled: Callable[[RunConfig, Choice], tuple[int, int]],
) -> list[Option]:
    """Every change that is worth it. `own`: of the run as it is. `predicted` predicts a run,
    `filled` gives (needed, available) bytes of the fullest device with such rounds."""
    found = []
    before = loss_rise(config, own.choice)
    for key, value in _changes(config, places):
        try:
            run = changed(config, {key: value})
            prediction = predicted(run)
            needed, available = filled(run, prediction.choice)
        except DilocoxError:
            continue  # the run file cannot say it, or the method not do it
        loss = loss_rise(run, prediction.choice)
        speed = prediction.tokens_per_second / own.tokens_per_second
        lower = before is not None and loss is not None and loss <= before - LESS_LOSS
        if needed <= available and (speed >= FASTER or (lower and speed >= 1 / FASTER)):
            found.append(Option(key, value, prediction, loss, needed, available))
    return found


def _changes(config: RunConfig, places: Sequence[GpuPlacement]) -> Iterator[tuple[str, Any]]:
    if len(places) < 2:
        return
    if config.outer.device == "cpu" and not any(place.device.shared for place in places):
        yield "outer.device", "model"
    if config.outer.exchange == "gather" and len(places) > 2:
        yield "outer.exchange", "reduce"


def loss_rise(config: RunConfig, choice: Choice) -> float | None:
    """Predicted rise of the loss of rounds of this choice; None for gradients."""
    if config.exchanges_gradients:
        return None
    share = choice.delay / choice.slots
    steps, optimizer = config.total_steps, config.inner.optimizer
    return loss_of(choice.inner_steps, choice.codec, share, steps, optimizer)
