"""Averages the gradients of inner steps over the sites, for methods that exchange gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dilocox.coordinator.protocol.messages import ExchangeKey, RoundPlan
from dilocox.errors import TrainingError
from dilocox.outer.exchanger import Exchanger
from dilocox.outer.fragment_group import FragmentGroup
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.in_flight import Pending
from dilocox.utils import tracing


class GradientAverager:
    """One exchange per inner step, which carries the gradients of all pieces of a rank."""

    def __init__(self, states: Sequence[FragmentState], site: str, exchanger: Exchanger) -> None:
        """Prepare to average.

        Args:
            states: outer state of each piece. A rank of such a method has one piece.
            site: name of this rank's site.
            exchanger: runs the exchanges.
        """
        self._states, self._site, self._exchanger = states, site, exchanger
        self._in_flight: Pending | None = None

    @property
    def in_flight(self) -> Pending | None:
        """The exchange of gradients that has not ended. None if no exchange is in flight."""
        return self._in_flight

    def average(
        self, plan: RoundPlan, key: ExchangeKey, gradients: Mapping[str, torch.Tensor], late: bool
    ) -> None:
        """Replace `gradients` (full name to fp32) in place by their weighted mean over the sites.

        `late`: take the mean of the inner step before, whose exchange ran beside the computation of
        this step; zeros in the first step. The residual goes into the next step's contribution.
        Raises `TrainingError` if no site's gradients are finite.
        """
        state = self._states[0]
        before = self.land() if late else None
        weight = plan.members[self._site].weight
        with tracing.span("boundary", key=key.text, values=state.layout.length):
            u, finite = state.gradients(gradients, weight, plan.residual_decay)
        self.start(Pending.waiting(key, plan, 0, u, finite))
        mean = before if late else self.land()
        views = None if mean is None else state.layout.views(mean)
        for name, gradient in gradients.items():
            if views is None:
                gradient.zero_()
            else:
                gradient.copy_(views[name])

    def start(self, item: Pending) -> None:
        """Submit an exchange of gradients: a new one, or one of a checkpoint."""
        self._exchanger.start(item, FragmentGroup(self._states))
        self._in_flight = item

    def land(self) -> torch.Tensor | None:
        """Return the mean of the gradients in flight, flat fp32; None if no exchange is in flight.

        Raises `TrainingError` if no site's gradients were finite.
        """
        item, self._in_flight = self._in_flight, None
        if item is None:
            return None
        outcome = self._exchanger.wait(item)
        state = self._states[0]
        if item.contribution is not None:
            with tracing.span("residual"):
                state.committed(item.contribution, outcome.sent, outcome.second_error)
        self._exchanger.count(outcome, state.layout.length)
        if outcome.average is None:
            raise TrainingError(f"{item.key.text}: no site has finite gradients")
        return outcome.average
