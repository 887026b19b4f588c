"""Rules by which the notary accepts or refuses sites' signed statements of model states.

The initial state is signed before any training. The final state is signed after the flush, by sites
that take part in the flush. The notary refuses such a statement at any other time, because the
record would then contradict itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.state_statements import AnchorState, Report, RoundState, State


def taken_apart(statement: s.Statement) -> State | None:
    """Parse a site's statement. Returns its model state; None if it is about something else.

    Raises `RecordError` if the statement is malformed.
    """
    if statement.kind == s.CHECKPOINT:
        return State.of(statement, 0)
    if statement.kind == s.ROUND:
        RoundState.of(statement, 0)
    elif statement.kind == s.ANCHOR:
        AnchorState.of(statement)
    else:
        Report.of(statement)
    return None


@dataclass
class Holds:
    """The facts of the log by which signed states are judged."""

    theta: dict[int, State] = field(default_factory=dict)
    """Initial state by stage, as signed last."""
    begun: bool = False
    """True once something was trained: from then on the initial state is fixed."""
    first: list[str] | None = None
    """Members of round 0 in the run file's order; None before round 0 is planned."""
    flush: list[str] | None = None
    """Members of the flush; None before the flush is planned."""

    def planned(self, plan: RoundPlan) -> None:
        """Process the plan of a round."""
        if plan.round == 0:
            self.first = list(plan.members)
        if plan.kind == "flush":
            self.flush = list(plan.members)
        # Methods that exchange gradients make no commitments, so a plan after round 0 tells.
        self.begun = self.begun or plan.round > 0

    def remember(self, statement: s.Statement) -> None:
        """Process a statement that has been appended to the log."""
        if statement.kind == s.COMMITMENT:
            self.begun = True
        elif statement.kind == s.ENROLMENT and not self.begun:
            # A site that starts again may make another theta_0.
            site = statement.predicate["site"]
            self.theta = {n: held for n, held in self.theta.items() if held.site != site}
        elif statement.kind == s.RESUME:
            self.flush = None
        elif statement.kind == s.CHECKPOINT:
            # A log begun by an earlier version may hold a malformed statement.
            with contextlib.suppress(RecordError):
                state = State.of(statement, 0)
                if state.kind == "initial" and not self._is_known(state):
                    self.theta[state.stage] = state

    def why_not(self, state: State, steps: Collection[Mapping[str, Any]] | None) -> str | None:
        """Return the reason why the notary refuses a state now; None if it is valid.

        `steps`: predicates of the outer-step statements so far; None if the run's method has no
        outer steps.
        """
        if state.kind == "initial":
            return self._not_first(state)
        if state.kind != "final":
            return f"a model state of kind {state.kind!r}"
        if self.flush is None or state.site not in self.flush:
            return "a final state is signed by those who take part in the flush"
        if steps is None:
            return None
        flushed = [
            said for said in steps if said["kind"] == "flush" and said["stage"] == state.stage
        ]
        if not flushed or len(flushed) < flushed[0]["fragments"]:
            return "a final state is signed after the flush"
        return None

    def _is_known(self, state: State) -> bool:
        known = self.theta.get(state.stage)
        return known is not None and (known.root, known.listing) == (state.root, state.listing)

    def _not_first(self, state: State) -> str | None:
        """Return the reason why the notary refuses an initial state; None if it is valid.

        The site that makes theta_0 may die before any training. Then another site makes theta_0
        again, possibly with other bits. A repeated equal statement is always accepted.
        """
        if self._is_known(state):
            return None
        if self.begun:
            return "the run has begun from another state"
        if self.first is None:
            return None
        if state.site not in self.first:
            return "the run begins without this site"
        known = self.theta.get(state.stage)
        # Readers use the same order (`RunHistory.state`).
        before = itertools.takewhile(lambda name: name != state.site, self.first)
        if known is None or known.site not in before:
            return None
        return f"the run begins from the state of {known.site}"
