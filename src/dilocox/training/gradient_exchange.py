"""The exchange of gradients inside an inner step, for methods that exchange gradients."""

from __future__ import annotations

import torch

from dilocox.coordinator.protocol.messages import ExchangeKey, RoundPlan
from dilocox.training.rank_state import RankState


class GradientExchange:
    """Averages the gradients of one inner step over the sites."""

    def __init__(self, own: RankState, plan: RoundPlan, step: int) -> None:
        self._own = own
        self._plan = plan
        self._step = step

    def __call__(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace this rank's `gradients`, by full name, by the weighted mean over the sites."""
        key = ExchangeKey.gradient(self._plan.round, self._step, self._own.rank.place.stage)
        late = self._own.config.gradient_delay > 0
        self._own.outer.gradients.average(self._plan, key, gradients, late)
