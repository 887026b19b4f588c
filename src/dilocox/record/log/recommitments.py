"""Detection of sites that change a commitment after a resume. Pure.

A resume goes back to a checkpoint. Then exchanges are repeated whose payloads all sites have seen
before. A site that trains as before commits to the same contribution again. A site that commits to
a different contribution may have chosen it after seeing the others' payloads: this contribution is
`recommitted`.

The comparison holds only while the run repeats its earlier course. After a different plan, or after
the landing of a different decision, all sites make different contributions. The payloads seen
before then give no advantage.

A *course* here is the history of the run between two resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import RoundPlan, boundary_slots
from dilocox.record.log import statements as s
from dilocox.record.log.step_statements import Commitment, Step

Place = tuple[str, str, int]
"""(exchange key, site, shard)."""
_OTHERWISE = frozenset({
    "round", "kind",  # compared by the exchange's key, and as `Base.flush`
    "members",  # compared by name, and by site (`_BY_SITE`)
    "first_step",  # follows from the plans before
    "reason", "estimate", "checkpoint", "evaluate", "last",  # change no contribution
})  # fmt: skip
"""Fields of a plan that are not in `_PLAN`."""
_PLAN = tuple(name for name in RoundPlan.model_fields if name not in _OTHERWISE)
"""Fields of a plan that change contributions: those of its own round or, after the landing of its
exchanges, later ones. The statement of an outer step has each of them."""
_BY_SITE = ("ranges", "spaces", "weights")
"""Fields of an outer step's statement with a value for each of some sites."""


@dataclass(frozen=True)
class Base:
    """The inputs of the contributions to one exchange, as far as the round's plan fixes them."""

    key: ExchangeKey
    tick: int
    """Slots of the run that had ended at the exchange's boundary."""
    flush: bool
    plan: Mapping[str, Any]
    """Facts of the plan that change contributions: `_PLAN`, `_BY_SITE` and names of members."""

    @classmethod
    def of_step(cls, step: Step) -> Base:
        """Build the base from a decided outer step."""
        said = dict(step.said.items())
        plan = {name: said.get(name) for name in (*_PLAN, "members", *_BY_SITE)}
        return cls(step.key, step.tick, step.flush, plan)

    @classmethod
    def of_plan(cls, key: ExchangeKey, plan: RoundPlan, stages: int) -> Base:
        """Build the base from the plan of the round; `stages`: pipeline stages of a site."""
        flush, slot = plan.kind == "flush", 0
        if not flush:
            slots = boundary_slots(key.stage, stages, plan.fragments, plan.slots)
            slot = slots[key.fragment]
        said: dict[str, Any] = {name: getattr(plan, name) for name in _PLAN}
        members = plan.members.items()
        said["members"] = list(plan.members)
        said["ranges"] = {name: [list(each) for each in one.ranges] for name, one in members}
        said["spaces"] = {name: one.space for name, one in members}
        said["weights"] = {name: one.weight for name, one in members}
        return cls(key, plan.first_tick + slot, flush, said)

    def same(self, other: Base, site: str) -> bool:
        """Return True if both plans give `site` the same contribution from equal parameters.

        A field that one of the statements does not have may be equal.
        """
        one, two = (
            {name: (base.plan.get(name) or {}).get(site) for name in _BY_SITE}
            for base in (self, other)
        )
        alike = _alike(self.plan, other.plan, (*_PLAN, "members")) and _alike(one, two, _BY_SITE)
        return self.flush == other.flush and alike


@dataclass
class Recommitments:
    """Commitments and decisions of courses that a resume has abandoned."""

    found: set[Place] = field(default_factory=set)
    """Recommitted places of exchanges that have been decided since the resume."""
    _bound: dict[Place, Commitment] = field(default_factory=dict)
    """The commitment of each place that a later commitment must repeat."""
    _steps: dict[str, Step] = field(default_factory=dict)
    """Decisions of abandoned courses by exchange key."""
    _other: list[Step] = field(default_factory=list)
    """Decisions since the latest resume that differ from the decisions before it."""
    _free: set[Place] = field(default_factory=set)
    """Places whose contributions had other inputs in this course than in abandoned courses."""

    def resumed(
        self, tick: int, commitments: Mapping[Place, Commitment], steps: Mapping[str, Step]
    ) -> None:
        """Record that the run goes back to `tick`.

        The first commitment of a place stays bound as long as its base stays the same.

        Args:
            tick: Slots of the run that have ended at the checkpoint.
            commitments: Commitments of the abandoned course.
            steps: Decisions of the abandoned course by exchange key.
        """
        for place, each in commitments.items():
            step = steps.get(place[0])
            if step is not None and step.tick + step.delay <= tick:
                continue  # landed before the checkpoint: the exchange is not repeated
            if place not in self._bound or place in self._free:
                self._bound[place] = each
        self._steps.update(
            {key: step for key, step in steps.items() if step.tick + step.delay > tick}
        )
        stand = {key for key, step in steps.items() if step.tick <= tick}
        self.found = {place for place in self.found if place[0] in stand}
        self._other, self._free = [], set()

    def again(self, place: Place, said: Commitment, base: Base) -> bool:
        """Return True if a commitment is recommitted.

        A recommitted commitment differs from the commitment of the same place before a resume,
        although the inputs of the contribution are the same.
        """
        known = self._bound.get(place)
        if known is None or (known.values, known.payload) == (said.values, said.payload):
            return False
        return not self._differs(base, place[1])

    def _differs(self, base: Base, site: str) -> bool:
        """Return True if the inputs of a site's contribution differ from those before a resume."""
        if any(_landed(step, base) for step in self._other):
            return True
        before = self._steps.get(base.key.text)
        if before is not None:
            return not base.same(Base.of_step(before), site)
        # The exchange was not decided before the resume. Payloads were sent then only if all its
        # members had committed.
        there = {who for key, who, _ in self._bound if key == base.key.text}
        return there != set(base.plan["members"] or ())

    def stepped(self, step: Step, commitments: Mapping[Place, Commitment], shards: int) -> None:
        """Record a decided exchange, and find its recommitted places.

        Args:
            step: The decision.
            commitments: Commitments of the current course, to this exchange and to others.
            shards: FSDP ranks of a stage.
        """
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
        if before is not None and not _equal(before, step):
            # Each lands at its own time, and changes what comes after.
            self._other += [before, step]

    @property
    def idle(self) -> bool:
        """True if no commitment and no decision of an abandoned course is known."""
        return not self._bound and not self._steps

    def forget(self, oldest: int) -> None:
        """Drop rounds before `oldest`, to which no resume goes back any more."""
        self._bound = {
            place: each for place, each in self._bound.items() if _round_of(place[0]) >= oldest
        }
        self._steps = {key: one for key, one in self._steps.items() if one.key.round >= oldest}


def _alike(one: Mapping[str, Any], two: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return True if all fields `names` are equal, or not known of one of both."""
    pairs = [(one.get(name), two.get(name)) for name in names]
    return all(None in pair or pair[0] == pair[1] for pair in pairs)


def _equal(before: Step, step: Step) -> bool:
    """Return True if two decisions of an exchange change parameters and residuals alike."""
    one, two = (
        (each.set, sorted(each.payloads.items()), each.weights, each.shares)
        for each in (before, step)
    )
    return one == two and _alike(dict(before.said.items()), dict(step.said.items()), _PLAN)


def _landed(step: Step, base: Base) -> bool:
    """Return True if a decision landed before the contributions with this base were made.

    A decision lands after its delay, or earlier at the next boundary of one of its pieces.
    """
    later = base.key.round - step.key.round
    if base.flush or later > 1:
        return later > 0
    if step.tick + step.delay <= base.tick:
        return True
    return later == 1 and (step.key.stage, step.key.fragment) == (base.key.stage, base.key.fragment)


@dataclass
class Courses:
    """Follows `Recommitments` statement by statement, for the notary of a run in progress."""

    shards: int
    """FSDP ranks of a stage."""
    oldest: int = 0
    """First round whose commitments and decisions are kept."""
    recommitments: Recommitments = field(default_factory=Recommitments)
    _commitments: dict[Place, Commitment] = field(default_factory=dict)
    _steps: dict[str, Step] = field(default_factory=dict)

    @classmethod
    def read_back(cls, entries: Iterable[str], oldest: int, shards: int) -> Courses:
        """Rebuild from the entries of a log; rounds before `oldest` are ignored."""
        found = cls(shards, oldest)
        for entry in entries:
            found.take(s.opened(entry)[0])
        return found

    def take(self, statement: s.Statement) -> None:
        """Process a statement that has been appended to the log."""
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
        """Return True if a commitment with these `subjects` is recommitted; see `Recommitments`."""
        return self.recommitments.again(place, commitment_of(subjects), base)

    @property
    def idle(self) -> bool:
        """True if no abandoned course can matter any more.

        A further resume reads the log back (`read_back`).
        """
        return self.recommitments.idle

    def forget(self, oldest: int) -> None:
        """Drop rounds before `oldest`."""
        self.oldest = max(oldest, self.oldest)
        self.recommitments.forget(self.oldest)
        for place in [each for each in self._commitments if _round_of(each[0]) < self.oldest]:
            del self._commitments[place]
        for key in [each for each in self._steps if _round_of(each) < self.oldest]:
            del self._steps[key]


def commitment_of(subjects: Mapping[str, str], number: int = 0) -> Commitment:
    """Build a commitment from its subjects; `number`: index of the statement in the log."""
    return Commitment(subjects["values"], subjects.get("payload"), number)


def _round_of(key: str) -> int:
    return ExchangeKey.parse(key).round
