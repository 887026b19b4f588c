"""The outer loop of one rank: boundaries, exchanges in flight, landings (docs/algorithm.md §2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dilocox.compression.second_moments import carried
from dilocox.config.codec_spec import parse_spec
from dilocox.coordinator.protocol.fragment_groups import pieces_of
from dilocox.coordinator.protocol.messages import ExchangeKey, RoundPlan
from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.errors import TrainingError
from dilocox.outer.contribution import Outcome, Probe
from dilocox.outer.exchanger import Exchanger, Submit
from dilocox.outer.fragment_group import FragmentGroup, fragment_of
from dilocox.outer.fragment_state import FragmentState, digest_thread
from dilocox.outer.gradient_averager import GradientAverager
from dilocox.outer.in_flight import Pending
from dilocox.outer.layout import Layout
from dilocox.outer.loop_status import LoopStatus
from dilocox.outer.loss_gate import Gate, GradientProbe
from dilocox.outer.outer_step import Rule
from dilocox.outer.second_moments import Second, none_held, row_means, take_means, told_by
from dilocox.outer.snapshot import Snapshot
from dilocox.utils import tracing


@dataclass(frozen=True)
class Admission:
    """How contributions are judged and averaged; see `dilocox.config.admission`."""

    aggregation: str = "mean"
    examines: bool = False
    gate: Gate | None = None


@dataclass(frozen=True)
class LoopPlace:
    """Where the rank of an outer loop stands: its site, its stage, and the stages of a site."""

    site: str
    stage: int = 0
    stages: int = 1


class OuterLoop:
    """Exchanges all pieces of one rank: takes contributions at boundaries, applies averages at
    landings. A tick is a number of slots since the start of the run.

    Args:
        states: outer state of each piece. A fragment of a plan has consecutive pieces
            (`dilocox.coordinator.protocol.fragment_groups`).
        live: local parameters, full name to fp32 tensor. Landings change them in place.
        place: site and stage of this rank.
        submit: starts an exchange beside training.
        touch: called while this rank waits, so that it still counts as alive.
        hash_beside: compute digests of landed pieces in another thread, beside training.
        admission: how contributions are judged and averaged.
        second: returns the inner optimizer's second moments, for plans that share them.
    """

    def __init__(
        self,
        states: Sequence[FragmentState],
        live: Mapping[str, torch.Tensor],
        place: LoopPlace,
        submit: Submit,
        touch: Callable[[], None],
        hash_beside: bool = False,
        admission: Admission | None = None,
        second: Second = none_held,
    ) -> None:
        self.states = list(states)
        self.live = live
        self.status = LoopStatus()
        """This site's part in the exchanges. Callers change it by its methods."""
        self.landed = [-1] * len(self.states)
        """By piece: round of the exchange that landed on it last; -1 if none has landed."""
        self.pending: list[Pending] = []
        """Exchanges of pseudo-gradients that have not landed."""
        self.owner_landings: list[int] = []
        """Ticks at which the first stage's first fragment will land."""
        device = self.states[0].anchor.device
        self._exchanger = Exchanger(place.site, device, submit, touch, self.status)
        self.gradients = GradientAverager(self.states, place.site, self._exchanger)
        """Averages gradients, for methods that exchange gradients."""
        self._me = place.site
        self._stage = place.stage
        self._stages = place.stages
        self._hashing = digest_thread() if hash_beside else None
        self._admission = admission or Admission()
        self._second = second
        self._slope: GradientProbe | None = None
        self._held_back: list[tuple[int, Pending, int]] = []
        """Landings that wait for the state of a piece: (tick, exchange, piece)."""
        self._restored: list[Pending] = []
        """Exchanges of a checkpoint that are not submitted again yet."""

    def has_boundary(self, plan: RoundPlan, slot: int) -> bool:
        """True if a fragment of any stage has its boundary at the end of `slot`."""
        return any(slot in self._boundaries(plan, stage) for stage in range(self._stages))

    def has_due(self, plan: RoundPlan, slot: int) -> bool:
        """True if an exchange of this rank lands or begins at the end of `slot`."""
        tick = plan.first_tick + slot
        return bool(self.begins(plan, slot)) or any(item.lands_at <= tick for item in self.pending)

    def under_way(self, piece: int, before_round: int) -> bool:
        """True if an exchange of `piece` from a round before `before_round` has not landed."""
        return any(
            piece in self.pieces_of(item) and item.key.round < before_round for item in self.pending
        )

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over a piece from a donor, as it was after the landings of the snapshot's tick.

        A snapshot without tensors means that this rank's state is equal already. Held-back landings
        of later ticks follow at once.
        """
        piece, tick = snapshot.piece, snapshot.tick
        if snapshot.tensors:
            state = self.states[piece]
            state.adopt(self.live, snapshot.tensors, snapshot.codec, self.status.returning)
        self.status.mark_arrived(piece)
        self.landed[piece] = snapshot.landed
        waiting = [each for each in self._held_back if each[2] == piece]
        self._held_back = [each for each in self._held_back if each[2] != piece]
        for landed_at, item, _ in sorted(waiting, key=lambda each: each[0]):
            if landed_at > tick:
                self._land(item, landed_at, [piece])

    def end_of_slot(self, plan: RoundPlan, slot: int) -> bool:
        """Land, then begin, the exchanges that are due at the end of `slot` (1 to plan.slots).

        An exchange lands at the latest at the next boundary of any of its pieces, sooner than its
        delay if rounds become shorter. So at most one exchange of a piece is in flight.

        Returns True, on all ranks alike, if the first fragment of the first stage landed or began:
        the copy of a tied tensor must then be set from its owner.
        """
        tick = plan.first_tick + slot
        self.land_before(plan, slot)
        for fragment in self.begins(plan, slot):
            self._begin(plan, fragment, tick)
        self.land_due(tick)
        # A boundary may change parameters: it sets a piece that is not finite back to its anchor.
        begins = self._boundaries(plan, 0)[0] == slot
        return self._owner_lands(plan, slot, tick) or begins

    def begins(self, plan: RoundPlan, slot: int) -> list[int]:
        """Return the fragments of this rank that have their boundary at the end of `slot`."""
        boundaries = self._boundaries(plan, self._stage)
        return [fragment for fragment, due in enumerate(boundaries) if due == slot]

    def land_before(self, plan: RoundPlan, slot: int) -> None:
        """Land the exchanges that are due at the end of `slot`, and exchanges of pieces with a
        boundary there."""
        tick, count = plan.first_tick + slot, len(self.states)
        self.land_due(tick)
        begin = {
            piece
            for fragment in self.begins(plan, slot)
            for piece in pieces_of(fragment, plan.fragments, count)
        }
        self._land_all([each for each in self.pending if begin.intersection(self.pieces_of(each))],
                       tick)  # fmt: skip

    def land_due(self, tick: int) -> None:
        """Land all exchanges that are due by `tick`, in order of tick, then fragment."""
        self._land_all([item for item in self.pending if item.lands_at <= tick], tick)

    def _land_all(self, due: Sequence[Pending], tick: int) -> None:
        for item in sorted(due, key=lambda item: (item.lands_at, item.key.fragment)):
            self.pending.remove(item)
            self._land(item, min(item.lands_at, tick))

    def settle(self) -> None:
        """Wait until all exchanges in flight have ended. None of them lands."""
        for item in self.under_way_now():
            self._exchanger.wait(item)

    def close(self) -> None:
        """End the thread that computes digests. No landing may follow."""
        if self._hashing is not None:
            self._hashing.shutdown()

    def fold_into_residual(self, weight: float) -> None:
        """Move training that is in no average to the residual. No exchange in flight lands.

        Call this after an exchange took place without this site, which then enters the run again.
        """
        for item in self.under_way_now():
            outcome = self._exchanger.wait(item)
            self.status.counts.payload_bytes += outcome.payload_bytes
            if item.contribution is not None:
                fragment = self._whole(item.key, item.plan)
                fragment.committed(item.contribution, outcome.sent, outcome.second_error)
        self.pending = []
        for state in self.states:
            state.fold_into_residual(self.live, weight)
        self.status.mark_returning()

    def flush(self, plan: RoundPlan) -> None:
        """Land all exchanges in flight, then exchange and land the last contributions."""
        self.land_due(2**62)
        for fragment in range(plan.fragments):
            self._begin(plan, fragment, plan.first_tick)
        self.land_due(2**62)

    def reset_to_anchor(self) -> None:
        """Set all parameters to the anchor. Training since the last boundaries is lost."""
        for state in self.states:
            state.reset_to_anchor(self.live)

    def names(self, plan: RoundPlan, fragments: Sequence[int]) -> list[str]:
        """Return the full names of the tensors of these fragments of `plan`."""
        layouts = [self._fragment(plan, fragment).layout for fragment in fragments]
        return [name for layout in layouts for name in layout.names]

    def _fragment(self, plan: RoundPlan, fragment: int) -> FragmentGroup:
        return fragment_of(self.states, fragment, plan.fragments)

    def _whole(self, key: ExchangeKey, plan: RoundPlan) -> FragmentGroup:
        """Return the pieces of an exchange; an exchange of gradients carries all pieces."""
        if key.kind == "gradient":
            return FragmentGroup(self.states)
        return self._fragment(plan, key.fragment)

    def pieces_of(self, item: Pending) -> range:
        """Return the numbers of the pieces that an exchange carries."""
        return pieces_of(item.key.fragment, item.plan.fragments, len(self.states))

    def _boundaries(self, plan: RoundPlan, stage: int) -> list[int]:
        return boundary_slots(stage, self._stages, plan.fragments, plan.slots)

    def _owner_lands(self, plan: RoundPlan, slot: int, tick: int) -> bool:
        """True if the first stage's first fragment lands; found from the schedule alone."""
        if self._boundaries(plan, 0)[0] == slot:
            self.owner_landings = [min(when, tick) for when in self.owner_landings]
            self.owner_landings.append(tick + plan.delay)
        due = [when for when in self.owner_landings if when <= tick]
        self.owner_landings = [when for when in self.owner_landings if when > tick]
        return bool(due)

    def _begin(self, plan: RoundPlan, fragment: int, tick: int) -> None:
        whole = self._fragment(plan, fragment)
        key = ExchangeKey.outer(plan.round, self._stage, fragment)
        member = self._me in plan.members
        u, contributes, moments = None, False, None
        if member:
            weight = plan.members[self._me].weight
            contributes = not self.status.dropping
            with tracing.span("boundary", key=key.text, values=whole.layout.length):
                u, finite, bad = whole.boundary(self.live, weight, plan.residual_decay)
            contributes = contributes and finite
            if parse_spec(plan.codec).moments:
                moments = row_means(self._second(), whole.layout, plan.round)
            if not finite:
                self.status.report_non_finite(f"stage {self._stage}: pseudo-gradient of {bad}")
        lands_at = tick + plan.delay
        self._start(Pending.waiting(key, plan, lands_at, u, contributes, moments=moments))

    def _start(self, item: Pending) -> None:
        if item.key.kind == "gradient":
            self.gradients.start(item)
            return
        whole, admission = self._whole(item.key, item.plan), self._admission
        if item.probe is None:
            item.probe = self._probe(whole.layout)
        self._exchanger.start(item, whole, admission.aggregation, admission.examines)
        self.pending.append(item)

    def restore(
        self, in_flight: Sequence[Pending], owner_landings: Sequence[int], dropping: bool
    ) -> None:
        """Restore what a checkpoint knows of this loop, besides tensors.

        Args:
            in_flight: exchanges between boundary and landing, for `resume_in_flight`.
            owner_landings: the loop's `owner_landings` at that time.
            dropping: `LoopStatus.dropping` at that time.
        """
        self._restored = list(in_flight)
        self.owner_landings = list(owner_landings)
        if dropping:
            self.status.drop_round()

    def resume_in_flight(self) -> None:
        """Submit the exchanges of a checkpoint again. Call this once the run continues."""
        restored, self._restored = self._restored, []
        for item in restored:
            self._start(item)

    def under_way_now(self) -> list[Pending]:
        """Return all exchanges between boundary and landing, for a checkpoint."""
        gradients = self.gradients.in_flight
        return [*self.pending, gradients] if gradients else list(self.pending)

    def probe_with(self, slope: GradientProbe | None) -> None:
        """Judge the contributions of the next exchanges by `slope`; None: without a gate.

        `slope` is the held-out loss and its gradient, for the gate of a site of several ranks.
        """
        self._slope = slope

    def _probe(self, layout: Layout) -> Probe | None:
        """Return the loss gate's probe: the anchors as they are now, or the gradient there."""
        gate = self._admission.gate
        if gate is None:
            return None if self._slope is None else self._slope.probe(layout)
        return gate.probe(self.anchors(), layout)

    def probe_again(
        self, key: ExchangeKey, plan: RoundPlan, tensors: Mapping[str, torch.Tensor]
    ) -> Probe | None:
        """Return the probe of an exchange of a checkpoint, from its `Probe.tensors`."""
        layout, gate = self._whole(key, plan).layout, self._admission.gate
        if gate is not None:
            return gate.again(tensors, self.anchors(), layout)
        return GradientProbe.again(tensors, layout) if tensors else None

    def anchors(self) -> dict[str, torch.Tensor]:
        """Return all anchors as they are now: full name to fp32 view."""
        return {
            name: view
            for each in self.states
            for name, view in each.layout.views(each.anchor).items()
        }

    def _land(self, item: Pending, tick: int, pieces: Sequence[int] | None = None) -> None:
        """Land `pieces` of an exchange; None means all. Hold pieces back that await their state."""
        pieces = self.pieces_of(item) if pieces is None else pieces
        awaiting = self.status.awaiting
        self._held_back += [(tick, item, piece) for piece in pieces if piece in awaiting]
        here = [self.states[piece] for piece in pieces if piece not in awaiting]
        if not here:
            return
        outcome = self._exchanger.wait(item)
        fragment = self._fragment(item.plan, item.key.fragment)
        if outcome.missed:
            if item.contribution is None:
                raise TrainingError(
                    f"exchange {item.key.text} took place without this site, which must join again"
                )
            fragment.committed(item.contribution, None, pieces=here)
            self.status.counts.payload_bytes += outcome.payload_bytes
            self.status.mark_overtaken()
            return
        with tracing.span("landing", key=item.key.text, values=fragment.layout.length):
            self._apply(item, outcome, fragment, here)
        for piece in pieces:
            if piece not in awaiting:
                self.landed[piece] = item.key.round

    def _apply(
        self,
        item: Pending,
        outcome: Outcome,
        fragment: FragmentGroup,
        here: Sequence[FragmentState],
    ) -> None:
        plan, weight = item.plan, None
        # A site that is entering receives the average without a contribution of its own.
        if item.contribution is not None:
            weight = plan.members[self._me].weight
            with tracing.span("residual"):
                fragment.committed(item.contribution, outcome.sent, outcome.second_error, here)
        weights = [plan.members[site].weight for site in outcome.contributors]
        own = plan.members[self._me].weight if self._me in outcome.contributors else 0.0
        rule = Rule(
            # A site that is entering has a displacement too, once it trains in its first round.
            overlap=plan.overlap if weight is not None or plan.overlap == "keep" else "none",
            keep=plan.keep,
            learning_rate=plan.learning_rate,
            momentum=plan.momentum,
            share=own / sum(weights) if weights else 0.0,
            residual=0.0 if weight is None else plan.residual_view / weight,
        )
        average = outcome.average
        fragment.check(average, outcome.sent)
        for state, place in fragment.only(here):
            with tracing.span("outer step", overlap=rule.overlap):
                state.land(self.live, None if average is None else average[place], rule)
        if not item.counted:
            self._share_moments(item, outcome, fragment.layout)
            self._exchanger.count(outcome, fragment.layout.length)
            item.counted = True
        # A site that is entering may have fetched a Q of another codec than this exchange has.
        fragment.compressor(plan.codec)
        if outcome.advance is not None and here[0].warm is not None:
            here[0].warm = outcome.advance(here[0].warm)
        if self._hashing is not None:
            for state in here:
                state.start_digest(self._hashing)

    def _share_moments(self, item: Pending, outcome: Outcome, layout: Layout) -> None:
        """Apply the row means of second moments that the others' payloads carry, if any do."""
        if not parse_spec(item.plan.codec).moments:
            return
        said = zip(outcome.contributors, outcome.payloads, strict=True)
        others = [carried(payload, layout.geometry) for site, payload in said if site != self._me]
        if others:
            take_means(self._second(), layout, item.plan.round, told_by(others))
