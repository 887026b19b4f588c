"""The exchanges of a round: pseudo-gradients, or the gradients of every inner step.

`round_exchange` chooses between the two, once per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from dilocox.coordinator.protocol.messages import ExchangeKey, RoundPlan
from dilocox.inner.site_model import ExchangeGradients
from dilocox.training.evaluator import Evaluator
from dilocox.training.non_finite import NonFinitePolicy
from dilocox.training.rank_state import RankState
from dilocox.utils import tracing


class RoundExchange(Protocol):
    """The exchanges of one rank, as its trainer has them run."""

    def of_step(self, plan: RoundPlan, number: int) -> ExchangeGradients | None:
        """Return the function that averages the gradients of inner step `number` of the round.

        None if the method does not exchange gradients.
        """

    def end_slot(self, plan: RoundPlan, slot: int) -> None:
        """Take the boundaries and apply the landings that are due at the end of `slot`.

        Contributions that are not finite are dropped (see `NonFinitePolicy`). Raises
        `RunEndedError` if the run ends because of them.
        """

    def flush(self, plan: RoundPlan) -> None:
        """End all exchanges of this rank. The anchor is then the model that the run publishes."""


class PseudoGradientExchange:
    """Exchanges of pseudo-gradients, from boundaries to landings."""

    def __init__(self, own: RankState, evaluator: Evaluator, non_finite: NonFinitePolicy) -> None:
        self._own, self._outer = own, own.outer
        self._evaluator, self._non_finite = evaluator, non_finite

    def of_step(self, plan: RoundPlan, number: int) -> None:
        """Return None: gradients stay at this site."""

    def end_slot(self, plan: RoundPlan, slot: int) -> None:
        """See `RoundExchange`."""
        own, outer, begins = self._own, self._outer, self._outer.has_boundary(plan, slot)
        if (begins or slot == plan.slots) and self._non_finite.check_steps(plan):
            outer.status.drop_round()
            outer.reset_to_anchor()
            own.rank.model.sync_tied()
        due = outer.has_due(plan, slot)
        with own.meter.working(outer.status.counts if due else None):
            if self._evaluator.probe_batch is not None and begins:
                outer.land_before(plan, slot)
                self._probe(plan, outer.begins(plan, slot))
            if outer.end_of_slot(plan, slot):
                own.rank.model.sync_tied(moments=own.config.shares_moments)
        self._non_finite.check_pseudo_gradients(plan)

    def flush(self, plan: RoundPlan) -> None:
        """See `RoundExchange`. Does nothing if the flush of `plan` takes place without this site.

        The caller reports a contribution that was not finite.
        """
        if self._own.site not in plan.members:
            return
        tracing.mark("flush", codec=plan.codec)
        if self._evaluator.probe_batch is not None:
            self._outer.land_due(2**62)
            self._probe(plan, range(plan.fragments))
        self._outer.flush(plan)

    def _probe(self, plan: RoundPlan, fragments: Sequence[int]) -> None:
        """Measure the gradient of the held-out loss with respect to these fragments of the plan.

        A gate that judges contributions by gradients uses it.
        """
        names = self._outer.names(plan, fragments)
        self._outer.probe_with(self._evaluator.gradient_probe(names))


class GradientExchange:
    """Exchanges of the gradients of every inner step. The anchor follows the parameters."""

    def __init__(self, own: RankState, non_finite: NonFinitePolicy) -> None:
        self._own, self._non_finite = own, non_finite

    def of_step(self, plan: RoundPlan, number: int) -> ExchangeGradients:
        """See `RoundExchange`."""
        own = self._own
        key = ExchangeKey.gradient(plan.round, number, own.rank.place.stage)

        def average(gradients: dict[str, torch.Tensor]) -> None:
            late = own.config.gradient_delay > 0
            own.outer.gradients.average(plan, key, gradients, late)

        return average

    def end_slot(self, plan: RoundPlan, slot: int) -> None:
        """See `RoundExchange`. There is something to do at the end of the round alone."""
        if slot < plan.slots:
            return
        # The mean of each step has left this site's bad gradients out, so sites still agree.
        self._non_finite.check_steps(plan)
        for state in self._own.rank.states:
            state.take_anchor_from(self._own.rank.live)

    def flush(self, plan: RoundPlan) -> None:
        """See `RoundExchange`."""
        self._own.outer.gradients.land()


def round_exchange(
    own: RankState, evaluator: Evaluator, non_finite: NonFinitePolicy
) -> RoundExchange:
    """Return the exchanges of the run's method at this rank."""
    if own.config.exchanges_gradients:
        return GradientExchange(own, non_finite)
    return PseudoGradientExchange(own, evaluator, non_finite)
