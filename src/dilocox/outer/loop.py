"""The outer loop of one rank: boundaries, exchanges under way, landings (docs/algorithm.md §2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

import torch

from dilocox import timeline
from dilocox.codec_spec import parse_spec
from dilocox.compression import LowRank
from dilocox.compression.moments import carried
from dilocox.errors import TrainingError
from dilocox.outer.admission.gate import Gate, Slope
from dilocox.outer.attempt import Probe
from dilocox.outer.calendar import boundary_slots
from dilocox.outer.coordinator.messages import ExchangeKey, RoundPlan
from dilocox.outer.entry import Snapshot
from dilocox.outer.exchange import Contribution, Outcome
from dilocox.outer.moments import Second, none_held, row_means, take_means, told_by
from dilocox.outer.overlap import Rule
from dilocox.outer.state import FragmentState


@dataclass
class Pending:
    """An exchange between its boundary and its landing."""

    key: ExchangeKey
    plan: RoundPlan
    lands_at: int
    """Tick of the landing."""
    outcome: Future[Outcome]
    contribution: torch.Tensor | None
    """u, kept for the residual; none if this site only received."""
    contributes: bool
    probe: Probe | None = None
    """What its gate goes by, once it is handed in."""
    moments: torch.Tensor | None = None
    """`row_means` at its boundary, if they travel along."""

    @classmethod
    def waiting(
        cls,
        key: ExchangeKey,
        plan: RoundPlan,
        lands_at: int,
        contribution: torch.Tensor | None,
        contributes: bool,
        probe: Probe | None = None,
        moments: torch.Tensor | None = None,
    ) -> Pending:
        """An exchange that has not been handed in yet. `probe`: if it was handed in before."""
        return cls(key, plan, lands_at, Future(), contribution, contributes, probe, moments)


@dataclass
class Counts:
    """What a round cost, reset when it is reported."""

    wait_seconds: float = 0.0
    """Training stood still for data that had not come."""
    waited_for: dict[str, float] = field(default_factory=dict)
    """Seconds of it until the last site was there, by that site; the rest is the link's."""
    exchange_seconds: float = 0.0
    exchanges: int = 0
    payload_bytes: int = 0
    values: int = 0
    """fp32 values that the payloads stand for."""
    attempts: int = 0
    contributors: list[int] = field(default_factory=list)
    link: list[tuple[float, float, int]] = field(default_factory=list)
    """(start, end, bytes) of what came in, as `Outcome.link` has them."""
    work_seconds: float = 0.0
    """Processor time of the exchanges."""
    effective_ranks: list[tuple[float, int]] = field(default_factory=list)
    """(effective rank, values) of landings with a low-rank codec."""


@dataclass(frozen=True)
class Admission:
    """How contributions are judged and averaged; see `dilocox.config_admission`."""

    aggregation: str = "mean"
    examines: bool = False
    gate: Gate | None = None


Submit = Callable[[Contribution], "Future[Outcome]"]


class OuterLoop:
    """All fragments of one rank.

    `live` are the rank's local parameters, full name to fp32 tensor, which landings change in
    place. `touch` is called while waiting, so that the rank keeps counting as alive. `hash_beside`:
    digests of what has landed are computed beside training, whose processor then is another.
    `second`: gives the inner optimizer's second moments; asked for where plans share them.
    """

    def __init__(
        self,
        states: Sequence[FragmentState],
        live: Mapping[str, torch.Tensor],
        me: str,
        stage: int,
        stages: int,
        submit: Submit,
        touch: Callable[[], None],
        hash_beside: bool = False,
        admission: Admission | None = None,
        second: Second = none_held,
    ) -> None:
        self.states = list(states)
        self.live = live
        self.pending: list[Pending] = []
        self.gradient: Pending | None = None
        """The exchange of gradients under way, of methods that exchange those."""
        self.counts = Counts()
        self.dropping = False
        """This site's contributions do not count until the round ends (non-finite values)."""
        self.slope: Slope | None = None
        """What a gate without a model of its own goes by, at the next boundaries."""
        self.non_finite: str | None = None
        """The value that was not finite in the pseudo-gradient of a boundary, until it is read."""
        self._me = me
        self._stage = stage
        self._stages = stages
        self._submit = submit
        self._touch = touch
        self._hash_beside = hash_beside
        self._admission = admission or Admission()
        self._second = second
        self.owner_landings: list[int] = []
        """Ticks at which the first stage's first fragment will land."""
        self.behind = False
        """Something was exchanged without this site: its anchor is not the run's any more."""
        self.returning = False
        """It enters again, with its residual."""
        self.awaiting: set[int] = set()
        """While entering: fragments whose state has not come yet."""
        self._held_back: list[tuple[int, Pending]] = []
        """Landings that wait for the state of their fragment, each with its tick."""
        self.restored: list[Pending] = []
        """Exchanges of a checkpoint that are not handed in again yet."""

    def has_boundary(self, plan: RoundPlan, slot: int) -> bool:
        """True if a fragment of any stage has its boundary at the end of `slot`."""
        return any(slot in self._boundaries(plan, stage) for stage in range(self._stages))

    def has_due(self, plan: RoundPlan, slot: int) -> bool:
        """True if something of this rank lands or begins at the end of `slot`."""
        tick = plan.first_tick + slot
        return bool(self.begins(plan, slot)) or any(item.lands_at <= tick for item in self.pending)

    def under_way(self, fragment: int, before_round: int) -> bool:
        """True if an exchange of `fragment` from before `before_round` has not landed."""
        return any(
            item.key.fragment == fragment and item.key.round < before_round for item in self.pending
        )

    def adopt(self, snapshot: Snapshot) -> None:
        """Entering: take over a fragment as it was after the landings of the snapshot's tick.

        Without tensors: what this rank holds is the same. Landings since then follow at once.
        """
        fragment, tick = snapshot.fragment, snapshot.tick
        if snapshot.tensors:
            state = self.states[fragment]
            state.adopt(self.live, snapshot.tensors, snapshot.codec, self.returning)
        self.awaiting.discard(fragment)
        waiting = [each for each in self._held_back if each[1].key.fragment == fragment]
        self._held_back = [each for each in self._held_back if each not in waiting]
        for landed_at, item in sorted(waiting, key=lambda each: each[0]):
            if landed_at > tick:
                self._land(item, landed_at)

    def average_gradients(
        self, plan: RoundPlan, key: ExchangeKey, gradients: Mapping[str, torch.Tensor], late: bool
    ) -> None:
        """Replace `gradients` by their weighted mean over the sites.

        `late`: by the mean of the inner step before, which travelled beside this one's computation
        (zeros in the very first step). What compression withholds goes into the next step's.
        Raises `TrainingError` if no site's gradients are finite.
        """
        state = self.states[0]
        before = self.land_gradients() if late else None
        weight = plan.members[self._me].weight
        with timeline.span("boundary", key=key.text, values=state.layout.length):
            u, finite = state.gradients(gradients, weight, plan.residual_decay)
        self.gradient = Pending.waiting(key, plan, 0, u, finite)
        self._hand_in(self.gradient)
        mean = before if late else self.land_gradients()
        views = None if mean is None else state.layout.views(mean)
        for name, gradient in gradients.items():
            if views is None:
                gradient.zero_()
            else:
                gradient.copy_(views[name])

    def land_gradients(self) -> torch.Tensor | None:
        """The mean of the gradients under way, or none if there are none.

        Raises `TrainingError` if no site's gradients were finite.
        """
        item, self.gradient = self.gradient, None
        if item is None:
            return None
        outcome = self._wait(item)
        state = self.states[0]
        if item.contribution is not None:
            with timeline.span("residual"):
                state.committed(item.contribution, outcome.sent, outcome.second_error)
        self._count(outcome, state.layout.length)
        if outcome.average is None:
            raise TrainingError(f"{item.key.text}: no site has finite gradients")
        return outcome.average

    def end_of_slot(self, plan: RoundPlan, slot: int) -> bool:
        """Land, then begin, what is due at the end of the round's slot `slot` (1 to plan.slots).

        A fragment lands at the latest at its next boundary, which may be sooner than its delay
        where rounds become shorter: so one exchange of a fragment is under way at a time.
        Returns True if the first fragment of the first stage landed or began, at whichever rank:
        then a tied copy must be set from its owner.
        """
        tick = plan.first_tick + slot
        self.land_before(plan, slot)
        for fragment in self.begins(plan, slot):
            self._begin(plan, fragment, tick)
        self.land_due(tick)
        # A boundary sets a tensor that is not finite back to its anchor.
        begins = self._boundaries(plan, 0)[0] == slot
        return self._owner_lands(plan, slot, tick) or begins

    def begins(self, plan: RoundPlan, slot: int) -> list[int]:
        """Fragments of this rank that have their boundary at the end of `slot`."""
        boundaries = self._boundaries(plan, self._stage)
        return [fragment for fragment, due in enumerate(boundaries) if due == slot]

    def land_before(self, plan: RoundPlan, slot: int) -> None:
        """Land what is due at the end of `slot`, and what would be under way when an exchange of
        its fragment begins there."""
        tick, begins = plan.first_tick + slot, self.begins(plan, slot)
        self.land_due(tick)
        self._land_all([item for item in self.pending if item.key.fragment in begins], tick)

    def land_due(self, tick: int) -> None:
        """Land everything whose time has come, in order of time and fragment."""
        self._land_all([item for item in self.pending if item.lands_at <= tick], tick)

    def _land_all(self, due: Sequence[Pending], tick: int) -> None:
        for item in sorted(due, key=lambda item: (item.lands_at, item.key.fragment)):
            self.pending.remove(item)
            self._land(item, min(item.lands_at, tick))

    def settle(self) -> None:
        """Wait until all exchanges under way are decided; nothing of them lands."""
        for item in self.under_way_now():
            self._wait(item)

    def set_aside(self, weight: float) -> None:
        """This site was overtaken and will enter again: what it has trained and no average holds
        goes into the residual. Nothing that is under way lands here."""
        for item in self.under_way_now():
            outcome = self._wait(item)
            self.counts.payload_bytes += outcome.payload_bytes
            if item.contribution is not None:
                state = self.states[item.key.fragment]
                state.committed(item.contribution, outcome.sent, outcome.second_error)
        self.pending = []
        for state in self.states:
            state.set_aside(self.live, weight)
        self.behind, self.returning = False, True

    def flush(self, plan: RoundPlan) -> None:
        """End of training: land what is pending, then one last outer step of everything left."""
        self.land_due(2**62)
        for fragment in range(len(self.states)):
            self._begin(plan, fragment, plan.first_tick)
        self.land_due(2**62)

    def reset_to_anchor(self) -> None:
        """Go on from the anchor: what was trained since the last boundaries is given up."""
        for state in self.states:
            state.reset_to_anchor(self.live)

    def _boundaries(self, plan: RoundPlan, stage: int) -> list[int]:
        return boundary_slots(stage, self._stages, plan.fragments, plan.slots)

    def _owner_lands(self, plan: RoundPlan, slot: int, tick: int) -> bool:
        """Follow the first stage's first fragment by the calendar alone."""
        if self._boundaries(plan, 0)[0] == slot:
            self.owner_landings = [min(when, tick) for when in self.owner_landings]
            self.owner_landings.append(tick + plan.delay)
        due = [when for when in self.owner_landings if when <= tick]
        self.owner_landings = [when for when in self.owner_landings if when > tick]
        return bool(due)

    def _begin(self, plan: RoundPlan, fragment: int, tick: int) -> None:
        state = self.states[fragment]
        key = ExchangeKey.outer(plan.round, self._stage, fragment)
        member = self._me in plan.members
        u, contributes, moments = None, False, None
        if member:
            weight = plan.members[self._me].weight
            contributes = not self.dropping
            with timeline.span("boundary", key=key.text, values=state.layout.length):
                u, finite = state.boundary(self.live, weight, plan.residual_decay)
            contributes = contributes and finite
            if parse_spec(plan.codec).moments:
                moments = row_means(self._second(), state.layout, plan.round)
            if not finite:
                self.non_finite = f"stage {self._stage}: pseudo-gradient of {state.non_finite}"
        lands_at = tick + plan.delay
        self._start(Pending.waiting(key, plan, lands_at, u, contributes, moments=moments))

    def _start(self, item: Pending) -> None:
        self._hand_in(item)
        if item.key.kind == "gradient":
            self.gradient = item
        else:
            self.pending.append(item)

    def take_up_again(self) -> None:
        """Hand in the exchanges that a checkpoint held; once the run goes on."""
        restored, self.restored = self.restored, []
        for item in restored:
            self._start(item)

    def under_way_now(self) -> list[Pending]:
        """All exchanges between boundary and landing, for a checkpoint."""
        return [*self.pending, self.gradient] if self.gradient else list(self.pending)

    def _hand_in(self, item: Pending) -> None:
        plan, state = item.plan, self.states[item.key.fragment]
        chosen = state.compressor(plan.codec)
        if item.moments is not None and not isinstance(chosen, LowRank):
            chosen = chosen.carrying(item.moments)
        outer, admission = item.key.kind == "outer", self._admission
        if outer and item.probe is None:
            item.probe = self._probe(state)
        item.outcome = self._submit(
            Contribution(
                key=item.key,
                length=state.layout.length,
                values=None if item.contribution is None else item.contribution.cpu(),
                compressor=chosen,
                warm=state.warm if isinstance(chosen, LowRank) else None,
                mode=plan.exchange,
                weights={site: member.weight for site, member in plan.members.items()},
                contributes=item.contributes,
                aggregation=admission.aggregation if outer else "mean",
                examines=admission.examines and outer,
                probe=item.probe,
            )
        )

    def _probe(self, state: FragmentState) -> Probe | None:
        """What the gate goes by: all anchors as they are now, or the slope there."""
        gate = self._admission.gate
        if gate is None:
            return None if self.slope is None else self.slope.probe(state.layout)
        return gate.probe(self.anchors(), state.layout)

    def probe_again(self, fragment: int, tensors: Mapping[str, torch.Tensor]) -> Probe | None:
        """The probe of an exchange of a checkpoint, of what `Probe.tensors` gave for it."""
        layout, gate = self.states[fragment].layout, self._admission.gate
        if gate is not None:
            return gate.again(tensors, self.anchors(), layout)
        return Slope.again(tensors, layout) if tensors else None

    def anchors(self) -> dict[str, torch.Tensor]:
        """All anchors as they are now: full name to fp32 view."""
        return {
            name: view
            for each in self.states
            for name, view in each.layout.views(each.anchor).items()
        }

    def _land(self, item: Pending, tick: int) -> None:
        if item.key.fragment in self.awaiting:
            self._held_back.append((tick, item))
            return
        outcome = self._wait(item)
        state = self.states[item.key.fragment]
        if outcome.missed:
            if item.contribution is None:
                raise TrainingError(
                    f"{item.key.text} was carried without this site; it must join again"
                )
            state.committed(item.contribution, None)
            self.counts.payload_bytes += outcome.payload_bytes
            self.behind = True
            return
        with timeline.span("landing", key=item.key.text, values=state.layout.length):
            self._apply(item, outcome)

    def _apply(self, item: Pending, outcome: Outcome) -> None:
        state, plan = self.states[item.key.fragment], item.plan
        # One that enters receives what it has no part in.
        weight = None
        if item.contribution is not None:
            weight = plan.members[self._me].weight
            with timeline.span("residual"):
                state.committed(item.contribution, outcome.sent, outcome.second_error)
        weights = [plan.members[site].weight for site in outcome.contributors]
        own = plan.members[self._me].weight if self._me in outcome.contributors else 0.0
        rule = Rule(
            # One that enters has a displacement too, once its own round goes on.
            overlap=plan.overlap if weight is not None or plan.overlap == "keep" else "none",
            keep=plan.keep,
            learning_rate=plan.learning_rate,
            momentum=plan.momentum,
            share=own / sum(weights) if weights else 0.0,
            residual=0.0 if weight is None else plan.residual_view / weight,
        )
        with timeline.span("outer step", overlap=rule.overlap):
            state.land(self.live, outcome.average, rule)
        self._share_moments(item, outcome)
        # One that enters may have fetched a Q of another rank than that of this exchange.
        state.compressor(plan.codec)
        if outcome.advance is not None and state.warm is not None:
            state.warm = outcome.advance(state.warm)
        if self._hash_beside:
            state.start_digest()
        self._count(outcome, state.layout.length)

    def _share_moments(self, item: Pending, outcome: Outcome) -> None:
        """Take over what the sites have said of the second moments, if their payloads carry it."""
        if not parse_spec(item.plan.codec).moments:
            return
        layout = self.states[item.key.fragment].layout
        said = zip(outcome.contributors, outcome.payloads, strict=True)
        others = [carried(payload, layout.geometry) for site, payload in said if site != self._me]
        if others:
            take_means(self._second(), layout, item.plan.round, told_by(others))

    def _count(self, outcome: Outcome, values: int) -> None:
        counts = self.counts
        counts.exchange_seconds += outcome.seconds
        counts.exchanges += 1
        counts.payload_bytes += outcome.payload_bytes
        counts.values += values
        counts.attempts += outcome.attempts
        counts.contributors.append(len(outcome.contributors))
        counts.link.extend(outcome.link)
        counts.work_seconds += outcome.work_seconds
        if outcome.effective_rank is not None:
            counts.effective_ranks.append(outcome.effective_rank)

    def _wait(self, item: Pending) -> Outcome:
        start = time.monotonic()
        with timeline.span("wait for landing", key=item.key.text):
            while not wait_for([item.outcome], timeout=1.0).done:
                self._touch()
            outcome = item.outcome.result()
        self.counts.wait_seconds += time.monotonic() - start
        self._blame(outcome, start)
        return outcome

    def _blame(self, outcome: Outcome, since: float) -> None:
        """Who came last, if this rank stood still for it from `since` on."""
        others = {site: at for site, at in outcome.arrivals.items() if site != self._me}
        last = max(others, key=lambda site: others[site], default=None)
        if last is not None and others[last] > since:
            waited = self.counts.waited_for
            waited[last] = waited.get(last, 0.0) + min(others[last], time.monotonic()) - since
