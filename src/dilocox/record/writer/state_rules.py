"""Which states of the model a site can hold, as far as the log of a run that goes on tells.

The state that a run begins from is signed before anything is trained, the one that it ends with by
those who take part in the flush, after it. A site that signs one at another time is not believed:
beside the others' it would make the record contradict itself.
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
from dilocox.record.log.state_statements import AnchorState, Attestation, Report, RoundState, State


def taken_apart(statement: s.Statement) -> State | None:
    """The model state that a site's statement is about, if it is about one. Raises `RecordError`
    for a statement that is not whole."""
    if statement.kind == s.CHECKPOINT:
        return State.of(statement, 0)
    if statement.kind == s.ROUND:
        RoundState.of(statement, 0)
    elif statement.kind == s.ANCHOR:
        AnchorState.of(statement)
    elif statement.kind == s.REPORT:
        Report.of(statement)
    else:
        Attestation.of(statement)
    return None


@dataclass
class Holds:
    """What the states that sites sign are judged by."""

    theta: dict[int, State] = field(default_factory=dict)
    """What the run begins from, by stage, as it was signed last."""
    begun: bool = False
    """Something was trained: what the run began from stands."""
    first: list[str] | None = None
    """Members of round 0 in the run file's order, once it is planned."""
    flush: list[str] | None = None
    """Members of the flush, once it is planned."""

    def planned(self, plan: RoundPlan) -> None:
        """A round's plan is made."""
        if plan.round == 0:
            self.first = list(plan.members)
        if plan.kind == "flush":
            self.flush = list(plan.members)
        # Methods that exchange gradients commit to nothing.
        self.begun = self.begun or plan.round > 0

    def remember(self, statement: s.Statement) -> None:
        """A statement is in the log."""
        if statement.kind == s.COMMITMENT:
            self.begun = True
        elif statement.kind == s.ENROLMENT and not self.begun:
            # A site that begins again would make another theta_0.
            site = statement.predicate["site"]
            self.theta = {n: held for n, held in self.theta.items() if held.site != site}
        elif statement.kind == s.RESUME:
            self.flush = None
        elif statement.kind == s.CHECKPOINT:
            # A log that an earlier version has begun may hold one that is not whole.
            with contextlib.suppress(RecordError):
                state = State.of(statement, 0)
                if state.kind == "initial" and not self._is_known(state):
                    self.theta[state.stage] = state

    def why_not(self, state: State, steps: Collection[Mapping[str, Any]] | None) -> str | None:
        """Why a site cannot hold this state now; none if it can.

        `steps`: what was decided, as outer-step statements say it; none where there are none.
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
        """Why a run does not begin from this state. Who makes theta_0 may die before anything is
        trained, and another makes it anew: its bits may be others. Who says the same again does no
        harm."""
        if self._is_known(state):
            return None
        if self.begun:
            return "the run has begun from another state"
        if self.first is None:
            return None
        if state.site not in self.first:
            return "the run begins without this site"
        known = self.theta.get(state.stage)
        # Readers go by the same order (`Course.state`).
        before = itertools.takewhile(lambda name: name != state.site, self.first)
        if known is None or known.site not in before:
            return None
        return f"the run begins from the state of {known.site}"
