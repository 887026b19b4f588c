"""The coordinator's own time measurements of sites, which do not depend on the sites' claims.

Measurements are not logged. A coordinator that restarts begins without them.
"""

from __future__ import annotations

from collections.abc import Callable

from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.arrivals import Arrivals
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.coordinator.server.step_clock import StepClock
from dilocox.coordinator.server.stragglers import Straggler, overdue
from dilocox.coordinator.server.transitions import plan_round
from dilocox.coordinator.server.vote_times import VoteTimes


class Clocks:
    """Times at which sites arrived at exchanges, voted on them, and took their steps."""

    def __init__(self, limits: Timeouts) -> None:
        self._limits = limits
        self.arrivals, self.votes = Arrivals(), VoteTimes()
        self.steps = StepClock(limits.beat)

    def happened(self, state: CoordinatorState, event: e.Event, now: float) -> None:
        """Note an event that was logged and applied."""
        self.steps.happened(state, event, now)
        self.votes.happened(event, now)

    def planned(
        self, state: CoordinatorState, plan: e.Planned, record: Callable[[e.Event], None]
    ) -> e.Planned:
        """Return `plan`, or a new one if the clock corrects measurements behind it.

        `record` logs the corrections.
        """
        round_ = int(plan.plan["round"])
        if not state.config.measures:
            return plan
        for event in self.steps.findings(state, round_ - 1, plan.time):
            record(event)
            again = plan_round(state, round_, plan.time)
            plan = again if isinstance(again, e.Planned) else plan
        return plan

    def overdue(self, state: CoordinatorState, now: float) -> list[Straggler]:
        """Return the stragglers, sites without which the others go on now.

        Call it often. Time in which the coordinator itself was held up does not count.
        """
        held_up = self._limits.heartbeat / 2
        self.arrivals.look(now, held_up)
        self.steps.look(now, held_up)
        self.votes.look(now, held_up)
        late = overdue(state, self.arrivals, now, self._limits)
        return late or self.votes.overdue(state, self.arrivals, now, self._limits)
