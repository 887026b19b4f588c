"""Bounds on the time of a site's inner steps, from the coordinator's own clock.

A site reports how long its steps take, and the number of steps of the other sites depends on that.
The coordinator sees when a site arrives at its exchanges. Between two arrivals the site has taken
the steps of its plan, and has waited only for plans, leases and decisions, which the coordinator
knows. All other time went into steps. Pure: time is an argument.

A claim is replaced only if the clock contradicts it. Latency, decoding and reports take time at
every site. So a site may need twice the median time that the other sites need for this, plus one
beat. In rounds as short as a beat, a quarter of the site's time replaces the beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.coordinator.protocol.round_plan import AT_ONCE, boundary_slots
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.exchange_votes import RankKey
from dilocox.coordinator.server.state import CoordinatorState

USUAL = 2.0
"""Time beside steps that a site may need in a round, as a multiple of the other sites' median."""
SHORT = 0.25
"""Share of the site's time that replaces the allowance of one beat if it is less."""
NEAR = 1.25
"""A claim that is wrong by less than this factor is kept."""
KEPT = 6
"""Number of rounds whose times are kept."""
_US = 1_000_000

Evidence = tuple[float, int]
"""(moment in seconds, steps): from this moment on the site took this number of steps without any
further wait."""
_Key = TypeVar("_Key")
Moments = dict[tuple[str, int], float]
"""Moments in seconds, by site and round."""


class StepClock:
    """Times at which sites got plans, arrived at exchanges and finished rounds."""

    def __init__(self, beat: float) -> None:
        """`beat`: seconds between two heartbeats of a rank."""
        self._beat = beat
        self._told: Moments = {}
        self._done: Moments = {}
        self._arrived: dict[str, dict[RankKey, float]] = {}
        self._decided: dict[str, float] = {}
        self._leases: list[tuple[int, float]] = []
        self._looked: float | None = None
        self._judged = -1

    def told(self, site: str, round_: int, now: float) -> None:
        """Note that a site got the plan of a round; the first time counts."""
        self._told.setdefault((site, round_), now)

    def done(self, site: str, round_: int, now: float) -> None:
        """Note that a rank of a site finished a round; the last rank counts."""
        self._done[site, round_] = now

    def arrived(self, key: str, rank: RankKey, now: float) -> None:
        """Note that a rank begins an exchange; the first time counts."""
        self._arrived.setdefault(key, {}).setdefault(rank, now)

    def happened(self, state: CoordinatorState, event: e.Event, now: float) -> None:
        """Note an event that was applied.

        No steps are timed while sites enter or leave, because donors then spend time on them.
        """
        if isinstance(event, e.Decided) and event.decision == "commit":
            self._decided.setdefault(event.key, now)
        elif isinstance(event, e.Leased):
            self._leases = [*self._leases[-1000:], (event.tick, now)]
        elif isinstance(event, e.Entered | e.Overtaken | e.Activated | e.SiteLost | e.Resumed):
            self._told, self._done, self._arrived = {}, {}, {}
            if isinstance(event, e.Resumed):
                self._judged = -1
        elif isinstance(event, e.Planned):
            self._forget(state, event.plan["round"] - KEPT)
        if self._arrived and state.with_role("entering"):
            self._arrived = {}

    def _forget(self, state: CoordinatorState, oldest: int) -> None:
        self._told = {at: when for at, when in self._told.items() if at[1] >= oldest}
        self._done = {at: when for at, when in self._done.items() if at[1] >= oldest}
        self._arrived = {key: at for key, at in self._arrived.items() if key in state.exchanges}
        self._decided = {key: at for key, at in self._decided.items() if key in state.exchanges}

    def look(self, now: float, limit: float) -> None:
        """Correct all times for a pause of the coordinator. Call it often.

        If more than `limit` seconds have passed since the last call, the coordinator itself was
        held up, and the pause counts for no site.
        """
        if self._looked is not None and now - self._looked > limit:
            by = now - self._looked

            def moved(moments: Mapping[_Key, float]) -> dict[_Key, float]:
                return {key: min(now, when + by) for key, when in moments.items()}

            self._told, self._done = moved(self._told), moved(self._done)
            self._decided = moved(self._decided)
            self._leases = [(tick, min(now, when + by)) for tick, when in self._leases]
            self._arrived = {key: moved(ranks) for key, ranks in self._arrived.items()}
        self._looked = now

    def findings(self, state: CoordinatorState, before: int, time: float) -> list[e.Clocked]:
        """Return corrections of step times that the clock contradicts.

        Rounds before `before` are checked, each once. `time` stamps the events.
        """
        found = []
        for round_ in [r for r in sorted(state.measured) if self._judged < r < before]:
            self._judged = round_
            claims = {s: own.step_us for s, own in state.measured[round_].items()}
            for site, step_us in self._bounded(state, round_, claims).items():
                found.append(e.Clocked(time, site, round_, step_us))
        return found

    def _bounded(
        self, state: CoordinatorState, round_: int, claims: Mapping[str, int]
    ) -> dict[str, int]:
        """Return corrected step times, in microseconds, of the sites with impossible claims."""
        plan = state.plans.get(round_)
        if plan is None or plan.kind != "train":
            return {}
        known = {}
        for site in claims:
            if site in plan.members and (found := self._evidence(state, plan, site)) is not None:
                known[site] = found
        late = {
            site: max(0.0, end - expected(evidence, claims[site]))
            for site, (end, evidence) in known.items()
        }
        bounds = {}
        for site, (end, evidence) in known.items():
            others = [seconds for other, seconds in late.items() if other != site]
            took = end - min((when for when, steps in evidence if steps), default=end)
            spare = min(self._beat, SHORT * took) + (USUAL * median(others) if others else 0.0)
            least = least_step(evidence, end - spare)
            most = self._most(plan, site, end)
            if claims[site] * NEAR < least:
                bounds[site] = least
            elif most is not None and claims[site] > most * NEAR:
                bounds[site] = most
        return bounds

    def _most(self, plan: RoundPlan, site: str, end: float) -> int | None:
        """Return the longest possible step time, in microseconds; None if it is not known.

        A site trains a round only between getting its plan and reporting its end.
        """
        told, done = self._told.get((site, plan.round)), self._done.get((site, plan.round))
        if told is None or done is None:
            return None
        passed = max(end, done) - told + self._beat
        return max(1, round(passed / plan.steps_of(site) * _US))

    def _evidence(
        self, state: CoordinatorState, plan: RoundPlan, site: str
    ) -> tuple[float, list[Evidence]] | None:
        """Return when a site arrived at its last exchange of a round, and the evidence until then.

        None if the times are not known.
        """
        stages, member = state.config.site.stages, plan.members[site]
        length = plan.inner_steps // plan.slots
        last = ExchangeKey.outer(plan.round, stages - 1, plan.fragments - 1)
        start = self._start(state, plan, site)
        end = min(self._of(last.text, site), default=None)
        if start is None or end is None:
            return None
        since, first = start

        def steps_after(tick: int) -> int:
            return plan.steps_of(site) - member.steps((tick - plan.first_tick) * length)

        ticks = range(first, plan.first_tick + plan.slots + 1)
        found = [(since, steps_after(first))]
        for key, began, lands in _landings(state, plan):
            if key in self._decided and lands in ticks and (lands > first or began == first):
                found.append((self._decided[key], steps_after(lands)))
        if first == plan.first_tick and (site, plan.round) in self._told:
            found.append((self._told[site, plan.round], steps_after(first)))
        granted = 0
        for tick, when in self._leases:
            if granted in ticks:
                # A rank gets its lease with its next beat.
                found.append((when + self._beat, steps_after(granted)))
            granted = tick
        found += [(when, 0) for when in self._before(site, last.text, end)]
        # Decisions and leases after the site's arrival cannot have held it up.
        return end, [(when, steps) for when, steps in found if when <= end]

    def _start(
        self, state: CoordinatorState, plan: RoundPlan, site: str
    ) -> tuple[float, int] | None:
        """Return the (moment, tick) from which on a site only trained, or None.

        Usually the moment is the arrival at the last exchange of the round before. After a pause
        for a checkpoint or an evaluation, the moment is the arrival at the first exchange of the
        round.
        """
        stages, before = state.config.site.stages, state.plans.get(plan.round - 1)
        if before is None or site not in before.members:
            return None
        key, tick = ExchangeKey.outer(before.round, stages - 1, before.fragments - 1), 0
        pauses = before.checkpoint or (before.evaluate and next(iter(before.members)) == site)
        if pauses:
            key = ExchangeKey.outer(plan.round, 0, 0)
            tick = boundary_slots(0, stages, plan.fragments, plan.slots)[0]
        when = max(self._of(key.text, site), default=None)
        return None if when is None or tick >= plan.slots else (when, plan.first_tick + tick)

    def _of(self, key: str, site: str) -> Sequence[float]:
        return [when for rank, when in self._arrived.get(key, {}).items() if rank[0] == site]

    def _before(self, site: str, key: str, end: float) -> Iterable[float]:
        """Return the times of decisions for which a rank must wait before it begins an exchange.

        A rank has at most `AT_ONCE` exchanges in flight.
        """
        place = ExchangeKey.parse(key).stage
        earlier = sorted(
            (min(times), other)
            for other in self._arrived
            if other != key and ExchangeKey.parse(other).stage == place
            if (times := self._of(other, site)) and min(times) <= end
        )
        until = len(earlier) + 1 - AT_ONCE
        return [self._decided[k] for _, k in earlier[: max(0, until)] if k in self._decided]


def _landings(state: CoordinatorState, plan: RoundPlan) -> Iterable[tuple[str, int, int]]:
    """Yield (key, tick of boundary, tick of landing) of exchanges that may land in a round."""
    stages = state.config.site.stages
    for each in (state.plans.get(plan.round - 1), plan):
        if each is None or each.kind != "train":
            continue
        for stage in range(stages):
            slots = boundary_slots(stage, stages, each.fragments, each.slots)
            for fragment, slot in enumerate(slots):
                began = each.first_tick + slot
                key = ExchangeKey.outer(each.round, stage, fragment).text
                yield key, began, began + each.delay


def expected(evidence: Sequence[Evidence], step_us: int) -> float:
    """Return the moment, in seconds, at which a site with steps of `step_us` arrives."""
    return max(when + steps * step_us / _US for when, steps in evidence)


def least_step(evidence: Sequence[Evidence], end: float) -> int:
    """Return the shortest step time, in microseconds, with which a site arrives as late as `end`.

    0 if the evidence gives no bound, for example if a slow site took no step after any of the known
    moments.
    """
    if any(when >= end for when, steps in evidence if not steps):
        return 0
    return round(max(0.0, min(((end - when) / n for when, n in evidence if n), default=0.0)) * _US)
