"""The outer loop of one rank: what is handed in when, and what lands where, without a network."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilocox.coordinator.protocol.messages import ExchangeKey, MemberPlan, RoundPlan
from dilocox.errors import ExchangeError, TrainingError
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.in_flight import Pending
from dilocox.outer.layout import Layout, split_pieces
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.outer.snapshot import Snapshot

pytestmark = pytest.mark.waits


def plan(round_: int = 0, **changes: Any) -> RoundPlan:
    member = MemberPlan(weight=1.0, batch=4, ranges=[(0, 16)], space="shared")
    fields: dict[str, Any] = {
        "round": round_,
        "kind": "train",
        "first_tick": 4 * round_,
        "first_step": 4 * round_,
        "members": {"paris": member, "lyon": member},
        "inner_steps": 4,
        "slots": 4,
        "fragments": 2,
        "delay": 2,
        "overlap": "keep",
        "keep": 1.0,
        "learning_rate": 1.0,
        "momentum": 0.0,
        "codec": "none",
        "residual_decay": 1.0,
        "exchange": "gather",
        "checkpoint": False,
        "evaluate": False,
        "last": False,
    }
    return RoundPlan(**{**fields, **changes})


class Wire:
    """Takes contributions; `answer` makes them outcomes."""

    def __init__(self) -> None:
        self.given: list[tuple[Contribution, Future[Outcome]]] = []
        self.touches = 0

    def submit(self, contribution: Contribution) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self.given.append((contribution, future))
        return future

    def touch(self) -> None:
        self.touches += 1

    def answer(self, *contributors: str, scale: float = 1.0, missed: bool = False) -> None:
        """Answer all that is open: the mean is `scale` times what this site brought."""
        for contribution, future in self.given:
            if future.done():
                continue
            values = contribution.values
            mean = None
            if contributors:
                mean = torch.ones(contribution.length) if values is None else values * scale
            sent = values if "paris" in contributors else None
            outcome = Outcome(mean, contributors, sent, None, 100, 0.5, 1, missed)
            future.set_result(outcome)

    @property
    def keys(self) -> list[str]:
        return [contribution.key.text for contribution, _ in self.given]


class Rank:
    """One rank of site paris with two fragments of a tensor each."""

    def __init__(self, error_feedback: bool = True, stage: int = 0, stages: int = 1) -> None:
        self.live = {"a": torch.zeros(3), "b": torch.zeros(3)}
        self.wire = Wire()
        groups = split_pieces({"a": 3, "b": 3}, 2)
        assert [list(group) for group in groups] == [["a"], ["b"]]
        states = [
            FragmentState(Layout.of({name: (3,)}), self.live, error_feedback=error_feedback)
            for name in ("a", "b")
        ]
        self.loop = OuterLoop(
            states,
            self.live,
            LoopPlace("paris", stage, stages),
            lambda contribution: self.wire.submit(contribution),
            self.wire.touch,
        )

    def train(self, by: float = 1.0) -> None:
        for tensor in self.live.values():
            tensor.sub_(by)

    def round(self, plan: RoundPlan, *contributors: str) -> list[bool]:
        """Inner steps of one each slot; everything is answered at once."""
        landed = []
        for slot in range(1, plan.slots + 1):
            self.train()
            self.wire.answer(*contributors)
            landed.append(self.loop.end_of_slot(plan, slot))
            self.wire.answer(*contributors)
        return landed

    def anchor(self, fragment: int) -> float:
        return float(self.loop.states[fragment].anchor[0])


def test_boundaries_and_landings_follow_the_calendar() -> None:
    rank = Rank()
    assert [rank.loop.has_boundary(plan(), slot) for slot in range(1, 5)] == [
        False, True, False, True,
    ]  # fmt: skip
    # Fragment a: boundary at slot 2, landing at 4. b: boundary at 4, landing at 2 of the next.
    assert rank.round(plan(), "paris", "lyon") == [False, True, False, True]
    assert rank.wire.keys == ["outer/0/0/0", "outer/0/0/1"]
    assert (rank.anchor(0), rank.anchor(1)) == (-2.0, 0.0)
    assert rank.loop.under_way(1, before_round=1)
    assert not rank.loop.under_way(0, before_round=1)
    assert not rank.loop.under_way(1, before_round=0)
    rank.round(plan(1), "paris", "lyon")
    # Fresh progress stays on top: 2 + 4 steps of a have landed by now, and 4 of b.
    assert (rank.anchor(0), rank.anchor(1)) == (-6.0, -4.0)
    assert float(rank.live["a"][0]) == float(rank.live["b"][0]) == -8.0
    counts = rank.loop.status.counts
    assert (counts.exchanges, counts.payload_bytes, counts.values) == (3, 300, 3 * 128)
    assert counts.contributors == [2, 2, 2]


def test_a_share_of_what_a_site_could_not_send_stays_in_what_it_trains_on() -> None:
    """Contributions, and so residuals, are weighted; what a site trains on is not."""
    rank = Rank()
    member = MemberPlan(weight=2.0, batch=4, ranges=[(0, 16)], space="shared")
    rank.round(plan(members={"paris": member, "lyon": member}, residual_view=0.5), "lyon")
    # Two steps of 1 before the boundary make u = 4, all of which stays here; two more came since.
    assert float(rank.loop.states[0].residual[0]) == 4.0
    assert rank.anchor(0) == -4.0
    assert float(rank.live["a"][0]) == -4.0 - 2.0 - 0.5 * 4.0 / 2.0


def test_the_flush_lands_everything_in_eight_bits() -> None:
    rank = Rank()
    rank.round(plan(), "paris", "lyon")
    rank.wire.answer("paris", "lyon")
    flush = plan(1, kind="flush", codec="int8", inner_steps=0, slots=0)
    submit = rank.wire.submit

    def at_once(contribution: Contribution) -> Future[Outcome]:
        future = submit(contribution)
        rank.wire.answer("paris", "lyon")
        return future

    rank.wire.submit = at_once  # type: ignore[method-assign]
    rank.loop.flush(flush)
    assert not rank.loop.pending
    assert [c.compressor.name for c, _ in rank.wire.given] == ["none", "none", "int8", "int8"]
    # All four steps of both are in the anchor, and the site is where the anchor is.
    assert (rank.anchor(0), rank.anchor(1)) == (-4.0, -4.0)
    assert float(rank.live["a"][0]) == -4.0


def test_what_is_left_out_is_sent_with_the_next() -> None:
    rank = Rank()
    rank.round(plan(), "lyon")
    rank.round(plan(1), "paris", "lyon")
    values = {c.key.text: c.values for c, _ in rank.wire.given}
    first, second = values["outer/0/0/0"], values["outer/1/0/0"]
    assert first is not None
    assert second is not None
    # Two steps of round 0 were left out; four new ones come with them.
    assert float(first[0]) == 2.0
    assert float(second[0]) == 6.0


def test_dropping_lets_nothing_count_until_it_ends() -> None:
    rank = Rank()
    rank.train(5.0)
    rank.loop.status.drop_round()
    rank.loop.reset_to_anchor()
    assert float(rank.live["a"][0]) == 0.0
    rank.round(plan(), "lyon")
    assert [c.contributes for c, _ in rank.wire.given] == [False, False]
    rank.loop.status.end_round()
    rank.round(plan(1), "paris", "lyon")
    assert [c.contributes for c, _ in rank.wire.given[2:]] == [True, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_pseudo_gradient_that_is_not_finite_is_named_and_not_brought(bad: float) -> None:
    rank = Rank(stage=0)
    rank.train()
    rank.live["a"][1] = bad
    rank.loop.end_of_slot(plan(), 1)
    assert rank.loop.status.take_non_finite() is None
    rank.loop.end_of_slot(plan(), 2)
    contribution, _ = rank.wire.given[0]
    assert not contribution.contributes
    assert contribution.values is not None
    assert bool(torch.isfinite(contribution.values).all())
    assert rank.loop.status.take_non_finite() == "stage 0: pseudo-gradient of a[1]"
    assert rank.loop.status.take_non_finite() is None, "it is told once"
    assert rank.live["a"].tolist() == [0.0, 0.0, 0.0]
    assert rank.live["b"].tolist() == [-1.0, -1.0, -1.0]


def test_an_exchange_that_a_receiver_missed_ends_its_part() -> None:
    rank = Rank()
    without = plan().model_copy(update={"members": {"lyon": plan().members["lyon"]}})
    rank.loop.end_of_slot(without, 2)
    rank.wire.answer("lyon", missed=True)
    with pytest.raises(TrainingError, match=r"exchange outer/0/0/0 took place without this site"):
        rank.loop.land_due(4)


def test_an_overtaken_site_keeps_all_its_work_as_residual() -> None:
    rank = Rank()
    # Steps of one: two of a are on their way when the others go on, two more come after.
    for slot in (1, 2):
        rank.train()
        rank.loop.end_of_slot(plan(), slot)
    rank.wire.answer("lyon", missed=True)
    for slot in (3, 4):
        rank.train()
        rank.loop.end_of_slot(plan(), slot)
    rank.wire.answer("lyon", missed=True)
    assert rank.loop.status.overtaken
    assert (rank.anchor(0), rank.anchor(1)) == (0.0, 0.0)
    rank.loop.fold_into_residual(1.0)
    assert not rank.loop.status.overtaken
    residuals = [state.residual for state in rank.loop.states]
    assert [None if each is None else float(each[0]) for each in residuals] == [4.0, 4.0]
    assert not rank.loop.pending
    # The run's anchor comes from a donor, the residual stays.
    there = {"anchor": torch.full((128,), 7.0), "momentum": torch.ones(128)}
    rank.loop.status.expect({0, 1})
    for fragment in (0, 1):
        rank.loop.adopt(Snapshot(fragment, 9, there))
    assert float(rank.live["a"][0]) == 7.0
    assert [None if each is None else float(each[0]) for each in residuals] == [4.0, 4.0]


def test_what_was_waited_for_is_put_down_to_who_came_last() -> None:
    rank = Rank()
    rank.loop.end_of_slot(plan(), 2)
    ((contribution, future),) = rank.wire.given
    now = time.monotonic()
    arrivals = {"paris": now - 9.0, "rome": now - 1.0, "lyon": now + 60.0}
    future.set_result(
        Outcome(torch.ones(contribution.length), ("lyon",), None, None, 0, 0.0, 1,
                arrivals=arrivals)
    )  # fmt: skip
    rank.loop.land_due(4)
    waited = rank.loop.status.counts.waited_for
    # No more than the wait itself, whatever the clocks say.
    assert list(waited) == ["lyon"]
    assert 0.0 <= waited["lyon"] <= rank.loop.status.counts.wait_seconds + 1e-3


def test_a_failed_exchange_is_raised_at_its_landing() -> None:
    rank = Rank()
    rank.loop.end_of_slot(plan(), 2)
    rank.wire.given[0][1].set_exception(ExchangeError("no decision"))
    rank.loop.end_of_slot(plan(), 3)
    with pytest.raises(ExchangeError, match="no decision"):
        rank.loop.end_of_slot(plan(), 4)


def test_entering_lands_on_what_it_has_fetched() -> None:
    """Landings from before a fragment came wait for it; those it holds already are left out."""
    rank = Rank()
    rank.loop.status.expect({0, 1})
    alone = plan().model_copy(update={"members": {"lyon": plan().members["lyon"]}})
    for slot in range(1, 5):
        rank.loop.end_of_slot(alone, slot)
        rank.wire.answer("lyon")
    assert all(c.values is None and not c.contributes for c, _ in rank.wire.given)
    rank.loop.land_due(6)
    assert rank.anchor(0) == 0.0
    state = {"anchor": torch.full((128,), 5.0), "momentum": torch.zeros(128)}
    # Fragment 0 was copied before the landing of tick 4, fragment 1 after that of tick 6.
    rank.loop.adopt(Snapshot(0, 3, state))
    assert rank.anchor(0) == 4.0
    rank.loop.adopt(Snapshot(1, 6, state))
    assert rank.anchor(1) == 5.0
    assert rank.loop.status.awaiting == set()


def test_who_has_entered_keeps_what_it_has_trained_at_landings_from_before() -> None:
    """Its first round goes on while they land; the others keep theirs, too."""
    rank = Rank()
    before = plan().model_copy(update={"members": {"lyon": plan().members["lyon"]}})
    rank.loop.end_of_slot(before, 4)  # boundary of fragment 1, which lands at 6
    rank.wire.answer("lyon")
    first = plan(1, first_tick=4, first_step=4)
    for slot in (1, 2):
        rank.train()
        rank.loop.end_of_slot(first, slot)
        rank.wire.answer("paris", "lyon")
    assert rank.anchor(1) == -1.0
    assert float(rank.live["b"][0]) == -1.0 - 2.0


def test_bytes_of_who_is_overtaken_count() -> None:
    rank = Rank()
    rank.train()
    rank.loop.end_of_slot(plan(), 2)
    rank.wire.answer("lyon", missed=True)
    rank.loop.land_due(4)
    assert rank.loop.status.counts.payload_bytes == 100
    rank.loop.end_of_slot(plan(), 4)
    rank.wire.answer("lyon", missed=True)
    rank.loop.fold_into_residual(1.0)
    assert rank.loop.status.counts.payload_bytes == 200
    assert rank.loop.status.counts.contributors == []


def test_entering_knows_which_landings_came_before_their_time() -> None:
    """Rounds become shorter: a landing of tick 6 comes with its fragment's boundary at 5, and is
    in what a donor copies there."""
    rank = Rank()
    rank.loop.status.expect({0, 1})
    alone = {"members": {"lyon": plan().members["lyon"]}}
    long = plan(delay=4, **alone)
    short = plan(1, first_tick=4, first_step=4, inner_steps=2, slots=2, delay=2, **alone)
    for slot in range(1, 5):
        rank.loop.end_of_slot(long, slot)
        rank.wire.answer("lyon")
    for slot in (1, 2):
        rank.loop.end_of_slot(short, slot)
        rank.wire.answer("lyon")
    state = {"anchor": torch.full((128,), 5.0), "momentum": torch.zeros(128)}
    rank.loop.adopt(Snapshot(0, 5, state))
    assert rank.anchor(0) == 5.0
    # Fragment 1 was copied before that of its boundary, at 6.
    rank.loop.adopt(Snapshot(1, 5, state))
    assert rank.anchor(1) == 4.0


def test_entering_where_the_rank_of_the_codec_has_changed_meanwhile() -> None:
    """What was handed in with one rank lands on a Q that came with another."""
    rank = Rank()
    shapes = {"a": (64, 64)}
    live = {"a": torch.zeros(64, 64)}
    donor, own = (FragmentState(Layout.of(shapes), live, error_feedback=True) for _ in range(2))
    donor.compressor("lowrank:8")
    rank.loop.states, rank.loop.live = [own], live
    rank.loop.status.expect({0})
    alone = {"members": {"lyon": plan().members["lyon"]}, "fragments": 1}
    rank.loop.end_of_slot(plan(codec="lowrank:7", delay=1, **alone), 4)
    seen: list[int] = []

    def advance(warm: torch.Tensor) -> torch.Tensor:
        seen.append(warm.numel())
        return warm

    (_, future), *_ = rank.wire.given
    future.set_result(replace(Outcome(None, (), None, None, 0, 0.0, 1), advance=advance))
    rank.loop.land_due(5)
    assert donor.warm is not None
    rank.loop.adopt(Snapshot(0, 4, dict(donor.agreed()), "lowrank:8"))
    donor.compressor("lowrank:7")
    assert donor.warm is not None
    assert own.warm_codec == "lowrank:7"
    assert seen == [donor.warm.numel()]


def test_restored_exchanges_are_handed_in_once_the_run_goes_on() -> None:
    rank = Rank()
    u = torch.full((128,), 2.0)
    key = ExchangeKey.outer(0, 0, 0)
    rank.loop.restore([Pending.waiting(key, plan(), 4, u, True)], [], dropping=False)
    assert not rank.wire.given
    rank.loop.resume_in_flight()
    rank.wire.answer("paris", "lyon")
    rank.loop.land_due(4)
    assert rank.anchor(0) == -2.0
    rank.loop.resume_in_flight()
    assert rank.wire.keys == ["outer/0/0/0"]


def test_gradients_are_averaged_in_place_and_bad_ones_left_out() -> None:
    rank = Rank(error_feedback=False)
    layout = Layout.of({"a": (3,), "b": (3,)})
    key = ExchangeKey.gradient(0, 1, 0)
    weighted = {"paris": plan().members["paris"].model_copy(update={"weight": 1.5})}
    unequal = plan(members={**plan().members, **weighted})
    brought: list[Contribution] = []

    def submit(contribution: Contribution) -> Future[Outcome]:
        brought.append(contribution)
        future: Future[Outcome] = Future()
        mean = torch.full((layout.length,), 7.0) if len(brought) < 3 else None
        future.set_result(Outcome(mean, ("lyon",), None, None, 10, 0.0, 1))
        return future

    rank.wire.submit = submit  # type: ignore[method-assign]
    rank.loop.states[0].layout = layout
    gradients = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    rank.loop.gradients.average(unequal, key, gradients, late=False)
    assert brought[0].contributes
    assert brought[0].values is not None
    assert brought[0].values[:3].tolist() == [1.5] * 3
    assert gradients["a"].tolist() == gradients["b"].tolist() == [7.0] * 3
    gradients["b"][2] = float("nan")
    rank.loop.gradients.average(unequal, key, gradients, late=False)
    assert not brought[1].contributes
    assert gradients["b"].tolist() == [7.0] * 3
    with pytest.raises(TrainingError, match="no site has finite gradients"):
        rank.loop.gradients.average(unequal, key, gradients, late=False)


def test_late_gradients_are_those_of_the_step_before_and_nothing_is_withheld_for_good() -> None:
    rank = Rank(error_feedback=True)
    gradients = {"a": torch.zeros(3), "b": torch.zeros(3)}
    layout = rank.loop.states[0].layout = Layout.of({"a": (3,), "b": (3,)})
    rank.loop.states[0].residual = torch.zeros(layout.length)
    brought: list[torch.Tensor] = []

    def submit(contribution: Contribution) -> Future[Outcome]:
        assert contribution.values is not None
        brought.append(contribution.values)
        future: Future[Outcome] = Future()
        # Half of it is withheld.
        sent = contribution.values / 2
        future.set_result(Outcome(sent, ("paris",), sent, None, 10, 0.0, 1))
        return future

    rank.wire.submit = submit  # type: ignore[method-assign]
    used = []
    for step in range(3):
        gradients["a"].fill_(float(4 * (step + 1)))
        key = ExchangeKey.gradient(0, step, 0)
        rank.loop.gradients.average(plan(), key, gradients, late=True)
        used.append(float(gradients["a"][0]))
    # Brought: 4, 8 + 2, 12 + 5; the first step has nothing to use yet.
    assert [float(u[0]) for u in brought] == [4.0, 10.0, 17.0]
    assert used == [0.0, 2.0, 5.0]
    assert [item.key.step for item in rank.loop.under_way_now()] == [2]
    assert rank.loop.gradients.land() is not None
    assert not rank.loop.under_way_now()
    residual = rank.loop.states[0].residual
    assert residual is not None
    assert float(residual[0]) == 8.5


def test_a_fragment_lands_at_the_latest_at_its_next_boundary() -> None:
    """Rounds that become shorter bring the next boundary before the delay is over."""
    rank = Rank()
    long = plan(delay=4)
    short = plan(1, first_tick=4, first_step=4, inner_steps=2, slots=2, delay=2)
    for slot in range(1, 5):
        rank.loop.end_of_slot(long, slot)
        rank.wire.answer("paris", "lyon")
    assert [item.lands_at for item in rank.loop.pending] == [6, 8]
    rank.loop.end_of_slot(short, 1)
    assert [(item.key.text, item.lands_at) for item in rank.loop.pending] == [
        ("outer/0/0/1", 8),
        ("outer/1/0/0", 7),
    ]
    rank.loop.end_of_slot(short, 2)
    assert [item.key.text for item in rank.loop.pending] == ["outer/1/0/0", "outer/1/0/1"]


def test_settling_waits_for_what_is_under_way_and_lands_nothing() -> None:
    """A site that leaves votes on all that it has begun; the outcome is the others' matter."""
    rank = Rank()
    for slot in range(1, 5):
        rank.train()
        rank.wire.answer("paris", "lyon")
        rank.loop.end_of_slot(plan(), slot)
    under_way = [item.key.text for item in rank.loop.under_way_now()]
    assert under_way, "the last boundary is at the end of the round"
    before = [rank.anchor(0), rank.anchor(1)]
    asked = threading.Timer(0.05, rank.wire.answer, ["paris", "lyon"])
    asked.start()
    rank.loop.settle()
    asked.join()
    assert all(future.done() for _, future in rank.wire.given)
    assert [rank.anchor(0), rank.anchor(1)] == before
    broken = Rank()
    broken.train()
    for slot in range(1, 5):
        broken.wire.answer("paris", "lyon")
        broken.loop.end_of_slot(plan(), slot)
    broken.wire.given[-1][1].set_exception(ExchangeError("no decision; waited for lyon"))
    with pytest.raises(ExchangeError, match="waited for lyon"):
        broken.loop.settle()
