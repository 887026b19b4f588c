"""How a site that enters follows the rounds, without a model and a network."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.coordinator.protocol.entry_messages import CheckPiecesReply
from dilocox.coordinator.protocol.messages import Entering
from dilocox.errors import ExchangeError, RunEndedError
from dilocox.outer.in_flight import Counts
from dilocox.outer.loop_status import LoopStatus
from dilocox.outer.snapshot import Snapshot
from dilocox.training import join_run
from dilocox.training.join_run import Donors, EntryStopped, JoiningSite

pytestmark = pytest.mark.waits

ENTRY = Entering(site="new", incarnation=1, donor="old", from_round=3)


def news(phase: str, **more: Any) -> SimpleNamespace:
    """What a beat brings back."""
    told = {"lease": 1000, "stop_tick": None, "role": "active", "entering": [], **more}
    return SimpleNamespace(phase=phase, **told)


def answer(plan: Any, receive: bool = False, leave: bool = False) -> SimpleNamespace:
    """What the coordinator says of a round's plan."""
    return SimpleNamespace(plan=plan, receive=receive, leave=leave)


class Followed:
    """A rank whose rounds are only counted, in a run that starts after some looks."""

    site = "new"

    def __init__(self, phases: list[str]) -> None:
        self.phases, self.asked, self.ends, self.touched = phases, 0, list[tuple[int, str]](), 0
        self.at = SimpleNamespace(round=0, slot=0, tick=0)
        self.config = SimpleNamespace(shares_moments=True)
        state = SimpleNamespace(
            anchor=torch.zeros(1), agreed=dict, digest_of=lambda agreed: "0" * 64
        )
        self.rank = SimpleNamespace(
            states=[state],
            place=SimpleNamespace(site="new", stage=0, shard=0),
            model=SimpleNamespace(sync_tied=lambda moments: None),
        )
        self.control = SimpleNamespace(touch=self._touch, hurry=lambda: None)
        self.outer = SimpleNamespace(
            status=LoopStatus(), end_of_slot=self._end_of_slot, reset_to_anchor=lambda: None
        )
        self.outer.status.counts.wait_seconds, self.outer.status.counts.exchanges = 7.0, 3
        self.client = SimpleNamespace(
            poll_plan=self._plan, ready=lambda: None, check_pieces=self._check
        )

    def _check(self, entry: Entering, pieces: Any, all_came: bool) -> CheckPiecesReply:
        """Most hold what has come."""
        return CheckPiecesReply(
            same=[each.piece for each in pieces], different=[], donor=entry.donor
        )

    def _touch(self) -> None:
        self.touched += 1

    def _end_of_slot(self, plan: Any, slot: int) -> None:
        # What the coordinator says to an exchange that is begun before.
        assert self.control.news.phase == "running", "the run is starting: nothing to exchange"
        self.ends.append((self.at.round, self.control.news.phase))

    def _plan(self, round_: int, wait: float) -> Any:
        """A recorded plan is there from the start; the site counts from round 4 on."""
        self.asked += 1
        members = {"old": None, "new": None} if round_ == 4 else {"old": None}
        plan = SimpleNamespace(
            kind="train", first_tick=2 * round_, slots=1, members=members,
            model_copy=lambda update: plan,
        )  # fmt: skip
        return answer(plan)


def joining_site_of(followed: Any) -> JoiningSite:
    """Its joining site, which would fetch from a donor that is there."""
    form: Any = lambda *_: None  # noqa: E731
    return JoiningSite(followed, followed.control, followed.client, ENTRY, form, 1.0)


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All has come already, and nobody needs to pause."""
    monkeypatch.setattr(join_run, "PAUSE", 0.0)
    monkeypatch.setattr(JoiningSite, "_fetch", lambda self: None)
    monkeypatch.setattr(JoiningSite, "adopt", lambda self: self._own.outer.status.expect([]))


def test_nothing_is_followed_before_the_run_has_started() -> None:
    """A resumed run has plans from the start; the site asks on, and lives."""
    followed: Any = Followed(["starting"] * 3 + ["running"])

    class Control(SimpleNamespace):
        looks = 0

        @property
        def news(self) -> Any:
            phase = followed.phases[min(followed.asked, len(followed.phases) - 1)]
            return news(phase)

    followed.control = Control(touch=followed._touch, hurry=lambda: None)
    joining_site_of(followed).catch_up()
    assert followed.ends == [(3, "running")]
    assert followed.asked == 3 + 2
    assert followed.touched >= 3
    assert followed.at.round == 4


def test_what_was_waited_for_on_the_way_is_not_in_the_first_round() -> None:
    followed: Any = Followed(["running"])
    followed.control.news = news("running")
    joining_site_of(followed).catch_up()
    assert followed.outer.status.counts == Counts()


def test_after_the_entry_no_published_state_stays() -> None:
    """The trainer keeps the joining site for the whole run."""

    class Published:
        """State that was replayed from bundles."""

    followed: Any = Followed(["running"])
    followed.control.news = news("running")
    form: Any = lambda *_: None  # noqa: E731
    published: Any = Published()
    joining_site = JoiningSite(
        followed, followed.control, followed.client, ENTRY, form, 1.0, published=published
    )
    left = weakref.ref(published)
    del published
    assert left() is not None
    joining_site.catch_up()
    assert left() is None


class Leased(SimpleNamespace):
    """News whose lease goes on by a slot with every look, as far as `most`."""

    looks, most, told = 0, 1000, dict[str, Any]()

    @property
    def news(self) -> Any:
        self.looks += 1
        return news("running", **{"lease": min(self.looks, self.most), **self.told})


def turns_back(followed: Any, **control: Any) -> bool | None:
    """Whether the site leaves if it turns back; None if it does not turn back."""
    followed.control = Leased(touch=followed._touch, hurry=lambda: None, **control)
    try:
        joining_site_of(followed).catch_up()
    except EntryStopped as stop:
        return stop.leaves
    return None


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_run, "GLANCE", 0.0)


def test_it_goes_no_further_than_the_lease(at_once: None) -> None:
    """Else it would say that it stands where nobody may be yet, and be refused."""
    followed: Any = Followed(["running"])
    ends: list[tuple[int, int]] = []

    def end_of_slot(plan: Any, slot: int) -> None:
        ends.append((plan.first_tick + slot, followed.control.looks))

    followed.outer.end_of_slot = end_of_slot
    assert turns_back(followed) is None
    assert [tick for tick, _ in ends] == [7]
    assert all(tick <= looks for tick, looks in ends)
    assert followed.at.tick == 8 <= followed.control.looks


def test_it_turns_back_where_the_run_stops(at_once: None) -> None:
    """At a slot of a round that it follows, and before one that will not be planned any more."""
    followed: Any = Followed(["running"])
    assert turns_back(followed, most=6, told={"stop_tick": 6}) is False
    assert followed.ends == []
    waiting: Any = Followed(["running"])
    waiting.client.poll_plan = lambda round_, wait: answer(None)
    assert turns_back(waiting, told={"stop_tick": 6}) is False


def test_a_site_that_is_to_leave_does_not_enter_again(at_once: None) -> None:
    followed: Any = Followed(["running"])
    followed.client.poll_plan = lambda round_, wait: answer(None, leave=True)
    assert turns_back(followed) is True


def test_a_site_that_the_flush_leaves_out_publishes_nothing(at_once: None) -> None:
    followed: Any = Followed(["running"])
    flush = SimpleNamespace(kind="flush", first_tick=6, slots=1, members={"old": None})
    followed.client.poll_plan = lambda round_, wait: answer(flush, receive=True)
    with pytest.raises(RunEndedError, match="site new: the run ends before it has entered"):
        turns_back(followed)


def test_of_two_donors_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has landed since on a piece that was taken over is not undone by another's copy."""
    followed: Any = Followed(["running"])
    taken: list[int] = []

    def adopt(snapshot: Any) -> None:
        taken.append(snapshot.tick)
        followed.outer.status.mark_arrived(snapshot.piece)

    followed.outer.adopt = adopt
    followed.control.news = news("running")
    monkeypatch.undo()
    monkeypatch.setattr(JoiningSite, "_fetch", lambda self: None)
    joining_site = joining_site_of(followed)
    for tick in (3, 6):
        joining_site._take(0, Snapshot(0, tick, {}, ""))
        joining_site.adopt()
    assert taken == [3]


LIMIT = 60.0


class Serving:
    """The donors of a rank of two pieces, whose receivers are not there until `broken` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken, self.formed = threading.Event(), list[str]()
        self.copies: list[weakref.ref[torch.Tensor]] = []
        states = [
            SimpleNamespace(
                agreed={"anchor": torch.ones(4), "momentum": torch.zeros(4)}.copy, warm_codec=""
            )
            for _ in range(2)
        ]
        self.own: Any = SimpleNamespace(
            site="old",
            at=SimpleNamespace(round=3, tick=40),
            rank=SimpleNamespace(
                states=states, place=SimpleNamespace(site="old", stage=0, shard=0)
            ),
            outer=SimpleNamespace(landed=[2, 2], under_way=lambda piece, round_: False),
        )
        self.control: Any = SimpleNamespace(news=news("starting"))
        self.donors = Donors(self.own, self.control, None, None, self._form, LIMIT)  # type: ignore[arg-type]
        offered = join_run.Snapshot

        def noted(piece: int, tick: int, tensors: Any, *more: Any) -> Snapshot:
            self.copies.extend(map(weakref.ref, tensors.values()))
            return offered(piece, tick, tensors, *more)

        monkeypatch.setattr(join_run, "Snapshot", noted)

    def _form(self, name: str, donor: str, receiver: str) -> Any:
        self.formed.append(receiver)
        assert self.broken.wait(LIMIT)
        raise ExchangeError(f"{receiver} cannot be reached")

    def serve(self, entering: Sequence[Entering]) -> None:
        """Serve what the coordinator names as entering."""
        self.control.news = news("starting", entering=entering)
        self.donors.serve()

    def breaks(self) -> None:
        """Every transfer fails."""
        self.broken.set()
        for donor in self.donors._serving.values():
            donor._thread.join(LIMIT)

    @property
    def alive(self) -> int:
        """Number of copied tensors that are in memory."""
        return sum(each() is not None for each in self.copies)


def test_of_an_entry_that_failed_nothing_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(monkeypatch)
    serving.serve([ENTRY])
    assert serving.alive == 4
    serving.breaks()
    assert serving.alive == 0
    # While the coordinator names the entry, the service is not started again.
    serving.serve([ENTRY])
    serving.serve([ENTRY])
    assert serving.formed == ["new"]
    assert caplog.text.count("could not serve new: new cannot be reached") == 1
    serving.serve([])
    assert not serving.donors._serving
    assert not serving.donors.busy


def test_sites_that_are_served_at_one_tick_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start, where the founder serves all other sites at once."""
    serving = Serving(monkeypatch)
    sites = [ENTRY.model_copy(update={"site": f"new{number}"}) for number in range(4)]
    serving.serve(sites[:2])
    serving.serve(sites[:3])
    assert serving.alive == 4
    offers = [list(donor._offers.queue) for donor in serving.donors._serving.values()]
    assert len(offers) == 3
    assert all([piece.piece for piece in each if piece] == [0, 1] for each in offers)
    del offers
    # What has landed since is another state.
    serving.own.outer.landed[1] = 3
    serving.serve(sites)
    assert serving.alive == 6
    serving.own.at.tick += 1
    serving.serve([*sites, ENTRY])
    assert serving.alive == 10
    serving.breaks()
    assert serving.alive == 0
