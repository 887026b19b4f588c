"""Commitments that were made again after a resume, to something else. Pure.

A resume goes back to a checkpoint, and exchanges are repeated whose payloads all sites have seen. A
site that trains as before commits to the same contribution. One that commits to another may have
chosen it by what it had seen: its contribution is `recommitted`.

That can be told only while the run repeats its earlier course. Another plan, or another decision
that has landed, makes other contributions of all sites, and what was seen is of no use any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import RoundPlan
from dilocox.coordinator.protocol.schedule import boundary_slots
from dilocox.record.log import statements as s
from dilocox.record.log.step_statements import Commitment, Step

Place = tuple[str, str, int]
"""(exchange key, site, shard)."""
_PLAN = ("first_tick", "slots", "inner_steps", "fragments")


@dataclass(frozen=True)
class Base:
    """What the contributions to an exchange are made from, as far as its plan says it."""

    key: ExchangeKey
    tick: int
    """Slots that had ended at its boundary."""
    flush: bool
    plan: Mapping[str, Any]

    @classmethod
    def of_step(cls, step: Step) -> Base:
        """By what was decided."""
        plan = {name: step.said.get(name) for name in (*_PLAN, "members", "ranges")}
        return cls(step.key, step.tick, step.flush, plan)

    @classmethod
    def of_plan(cls, key: ExchangeKey, plan: RoundPlan, stages: int) -> Base:
        """By the plan of its round; a site has so many pipeline stages."""
        flush, slot = plan.kind == "flush", 0
        if not flush:
            slots = boundary_slots(key.stage, stages, plan.fragments, plan.slots)
            slot = slots[key.fragment]
        said: dict[str, Any] = {name: getattr(plan, name) for name in _PLAN}
        said["members"] = list(plan.members)
        said["ranges"] = {
            name: [list(each) for each in member.ranges] for name, member in plan.members.items()
        }
        return cls(key, plan.first_tick + slot, flush, said)

    def same(self, other: Base, site: str) -> bool:
        """Whether `site` makes the same contribution by both plans, from the same parameters."""
        one, two = dict(self.plan), dict(other.plan)
        ranges = [(plan.pop("ranges", None) or {}).get(site) for plan in (one, two)]
        return one == two and (None in ranges or ranges[0] == ranges[1])


@dataclass
class Recommitments:
    """What was committed to and decided in courses of the run that were left."""

    found: set[Place] = field(default_factory=set)
    """Places that were recommitted, of exchanges that are decided since."""
    _bound: dict[Place, Commitment] = field(default_factory=dict)
    _steps: dict[str, Step] = field(default_factory=dict)
    _other: list[Step] = field(default_factory=list)
    """Decisions since the latest resume that are others than before it."""
    _free: set[Place] = field(default_factory=set)
    """Places that were committed to in a course which was another by then."""

    def resumed(
        self, tick: int, commitments: Mapping[Place, Commitment], steps: Mapping[str, Step]
    ) -> None:
        """The run goes back to `tick`; what the course that is left has committed to and decided.

        The first commitment stays bound as long as the base of it was the same.
        """
        for place, each in commitments.items():
            step = steps.get(place[0])
            if step is not None and step.tick + step.delay <= tick:
                continue  # it had landed, and is not exchanged again
            if place not in self._bound or place in self._free:
                self._bound[place] = each
        self._steps.update(
            {key: step for key, step in steps.items() if step.tick + step.delay > tick}
        )
        stand = {key for key, step in steps.items() if step.tick <= tick}
        self.found = {place for place in self.found if place[0] in stand}
        self._other, self._free = [], set()

    def again(self, place: Place, said: Commitment, base: Base) -> bool:
        """Whether a commitment to an exchange with this base is another than before a resume."""
        known = self._bound.get(place)
        if known is None or (known.values, known.payload) == (said.values, said.payload):
            return False
        return not self._differs(base, place[1])

    def _differs(self, base: Base, site: str) -> bool:
        """Whether a site's contribution is made from something else than it was before."""
        if any(_landed(step, base) for step in self._other):
            return True
        before = self._steps.get(base.key.text)
        if before is not None:
            return not base.same(Base.of_step(before), site)
        # It was not decided then. Payloads were sent only if all its members had committed.
        there = {who for key, who, _ in self._bound if key == base.key.text}
        return there != set(base.plan["members"] or ())

    def stepped(self, step: Step, commitments: Mapping[Place, Commitment], shards: int) -> None:
        """An exchange is decided, with these commitments to it among others."""
        if not self._bound and not self._steps:
            return
        key, base = step.key.text, Base.of_step(step)
        for site in step.said.get("members", step.set):
            for place in ((key, site, shard) for shard in range(shards)):
                said = commitments.get(place)
                if said is None:
                    continue
                self.found.discard(place)
                if self._differs(base, site):
                    self._free.add(place)
                elif self.again(place, said, base):
                    self.found.add(place)
        before = self._steps.get(key)
        if before is not None and _decision(before) != _decision(step):
            self._other.append(step)

    @property
    def idle(self) -> bool:
        """No commitment and no decision of a course that was left is known."""
        return not self._bound and not self._steps

    def forget(self, oldest: int) -> None:
        """Rounds before `oldest` are over and are not gone back to."""
        self._bound = {
            place: each for place, each in self._bound.items() if _round_of(place[0]) >= oldest
        }
        self._steps = {key: one for key, one in self._steps.items() if one.key.round >= oldest}


def _decision(step: Step) -> tuple[Any, ...]:
    """What of a decision changes the parameters that it lands on, and the residuals."""
    payloads = sorted(step.payloads.items())
    return step.set, payloads, step.weights, step.shares, step.learning_rate, step.momentum


def _landed(step: Step, base: Base) -> bool:
    """Whether a decision has changed what contributions with this base are made from.

    It lands after its delay, or at the next boundary of one of its pieces if that is sooner.
    """
    later = base.key.round - step.key.round
    if base.flush or later > 1:
        return later > 0
    if step.tick + step.delay <= base.tick:
        return True
    return later == 1 and (step.key.stage, step.key.fragment) == (base.key.stage, base.key.fragment)


@dataclass
class Courses:
    """The same, as the notary of a run that goes on follows it; nothing before the first resume."""

    shards: int
    """FSDP ranks of a stage."""
    oldest: int = 0
    """First round of which anything is kept."""
    recommitments: Recommitments = field(default_factory=Recommitments)
    _commitments: dict[Place, Commitment] = field(default_factory=dict)
    _steps: dict[str, Step] = field(default_factory=dict)

    @classmethod
    def read_back(cls, entries: Iterable[str], oldest: int, shards: int) -> Courses:
        """By the entries of a log that was resumed, lately in round `oldest`."""
        found = cls(shards, oldest)
        for entry in entries:
            found.take(s.opened(entry)[0])
        return found

    def take(self, statement: s.Statement) -> None:
        """A statement is in the log."""
        kind, said = statement.kind, statement.predicate
        if kind == s.RESUME:
            self.recommitments.resumed(int(said["tick"]), self._commitments, self._steps)
            self._commitments, self._steps = {}, {}
        elif kind == s.COMMITMENT and int(said["round"]) >= self.oldest:
            place = (str(said["exchange_key"]), str(said["site"]), int(said["shard"]))
            self._commitments[place] = commitment_of(statement.subjects)
        elif kind == s.STEP and int(said["round"]) >= self.oldest:
            step = Step.of(statement)
            self.recommitments.stepped(step, self._commitments, self.shards)
            self._steps[step.key.text] = step

    def again(self, place: Place, subjects: Mapping[str, str], base: Base) -> bool:
        """See `Recommitments`."""
        return self.recommitments.again(place, commitment_of(subjects), base)

    @property
    def idle(self) -> bool:
        """Nothing of a course that was left can matter any more, unless the run is resumed again:
        then the log is read back."""
        return self.recommitments.idle

    def forget(self, oldest: int) -> None:
        """Rounds before `oldest` are over."""
        self.oldest = max(oldest, self.oldest)
        self.recommitments.forget(self.oldest)
        for place in [each for each in self._commitments if _round_of(each[0]) < self.oldest]:
            del self._commitments[place]
        for key in [each for each in self._steps if _round_of(each) < self.oldest]:
            del self._steps[key]


def commitment_of(subjects: Mapping[str, str], number: int = 0) -> Commitment:
    """What a commitment names; `number`: which statement of the log it is."""
    return Commitment(subjects["values"], subjects.get("payload"), number)


def _round_of(key: str) -> int:
    return ExchangeKey.parse(key).round
