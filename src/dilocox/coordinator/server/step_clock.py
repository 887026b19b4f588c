"""What the coordinator's own clock says of how long the inner steps of a site take.

A site says itself how long its steps take, and how many steps the others take follows from that.
The coordinator sees when a site arrives at its exchanges. Between two arrivals the site has taken
the steps of its plan, and has waited for nothing but what the coordinator knows: plans, leases and
decisions. Time that none of these explain went into steps. Pure: time enters as an argument.

A claim is replaced only where the clock contradicts it. Latency, decoding and accounts take time at
every site: as much as the other sites of the round need is allowed twice, and one beat besides. In
rounds that are as short as beats it is a quarter of what the site took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.coordinator.protocol.schedule import AT_ONCE, boundary_slots
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.exchange_votes import RankKey
from dilocox.coordinator.server.state import CoordinatorState

USUAL = 2.0
"""Seconds beside steps that a site may need in a round, in those of the others' median."""
SHORT = 0.25
"""Instead of a beat, as a share of the time that a site took, where that is less."""
NEAR = 1.25
"""A claim that is off by less than this factor stays."""
KEPT = 6
"""Times of so many rounds are kept."""
_US = 1_000_000

Evidence = tuple[float, int]
"""(moment, steps): a site took so many steps from a moment on, and nothing held it up after."""
_Key = TypeVar("_Key")
Moments = dict[tuple[str, int], float]
"""By site and round, in seconds."""


class StepClock:
    """Moments of all sites: when they heard of a round, came to its exchanges, and were through."""

    def __init__(self, beat: float) -> None:
        """`beat`: seconds between two beats of a rank."""
        self._beat = beat
        self._told: Moments = {}
        self._done: Moments = {}
        self._arrived: dict[str, dict[RankKey, float]] = {}
        self._decided: dict[str, float] = {}
        self._leases: list[tuple[int, float]] = []
        self._looked: float | None = None
        self._judged = -1

    def told(self, site: str, round_: int, now: float) -> None:
        """A site is answered with the plan of a round; the first time counts."""
        self._told.setdefault((site, round_), now)

    def done(self, site: str, round_: int, now: float) -> None:
        """A rank of a site is through with a round; the last one counts."""
        self._done[site, round_] = now

    def arrived(self, key: str, rank: RankKey, now: float) -> None:
        """A rank begins an exchange; the first time counts."""
        self._arrived.setdefault(key, {}).setdefault(rank, now)

    def happened(self, state: CoordinatorState, event: e.Event, now: float) -> None:
        """An event was applied. While sites come and go no step is timed: donors serve them."""
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
        """To be called often. Time in which the caller itself was held up, for more than `limit`
        seconds, is taken out."""
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
        """Claims about steps of rounds before `before`, not judged yet, that the clock contradicts.

        `time` stamps the events.
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
        """Step times in microseconds by site, of those whose claim cannot be."""
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
        """The longest that a step can have taken: nobody trains a round before it hears of it, or
        after it was through."""
        told, done = self._told.get((site, plan.round)), self._done.get((site, plan.round))
        if told is None or done is None:
            return None
        passed = max(end, done) - told + self._beat
        return max(1, round(passed / plan.steps_of(site) * _US))

    def _evidence(
        self, state: CoordinatorState, plan: RoundPlan, site: str
    ) -> tuple[float, list[Evidence]] | None:
        """When a site came to its last exchange of a round, and what may have held it up before;
        None where nothing can be said."""
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
                # A rank hears of its lease with its next beat.
                found.append((when + self._beat, steps_after(granted)))
            granted = tick
        found += [(when, 0) for when in self._before(site, last.text, end)]
        # What was decided, or granted, after the site had come has held it up nowhere.
        return end, [(when, steps) for when, steps in found if when <= end]

    def _start(
        self, state: CoordinatorState, plan: RoundPlan, site: str
    ) -> tuple[float, int] | None:
        """(moment, tick) from which on a site did nothing but train: its last exchange of the round
        before, or, after a pause for a checkpoint or an evaluation, its first one of the round."""
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
        """Decisions that a rank waits for before it begins an exchange: only `AT_ONCE` of its own
        are under way."""
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
    """(key, tick of its boundary, tick of its landing) of exchanges that may land in a round."""
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
    """When a site whose steps take `step_us` comes to an exchange, in seconds."""
    return max(when + steps * step_us / _US for when, steps in evidence)


def least_step(evidence: Sequence[Evidence], end: float) -> int:
    """The shortest step time in microseconds with which a site comes as late as at `end`; 0 where
    nothing bounds it, as where a slow site takes no step after the moments that are known."""
    if any(when >= end for when, steps in evidence if not steps):
        return 0
    return round(max(0.0, min(((end - when) / n for when, n in evidence if n), default=0.0)) * _US)
