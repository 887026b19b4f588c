"""The exchange of gradients inside an inner step, for methods that exchange those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dilocox.outer.coordinator.messages import ExchangeKey, RoundPlan

if TYPE_CHECKING:
    from dilocox.trainer import Trainer


class GradientExchange:
    """Averages the gradients of an inner step between the sites."""

    def __init__(self, trainer: Trainer, plan: RoundPlan, step: int) -> None:
        self._trainer = trainer
        self._plan = plan
        self._step = step

    def __call__(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace local gradients by the weighted mean over the sites."""
        trainer = self._trainer
        key = ExchangeKey.gradient(self._plan.round, self._step, trainer.rank.place.stage)
        late = trainer.config.gradient_delay > 0
        trainer.outer.average_gradients(self._plan, key, gradients, late)
