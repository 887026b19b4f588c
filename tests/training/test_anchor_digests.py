"""What ranks tell of their pieces while a site enters, and what an entering rank takes over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.coordinator.protocol.entry_messages import CheckPiecesReply
from dilocox.coordinator.protocol.messages import Entering
from dilocox.errors import ExchangeError, TrainingError
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.loop_status import LoopStatus
from dilocox.outer.snapshot import Snapshot
from dilocox.training import anchor_digests
from dilocox.training.anchor_digests import UNFIT, ShownPieces
from dilocox.training.join_run import JoiningSite, entry_name

pytestmark = pytest.mark.waits

ENTRY = Entering(site="new", incarnation=1, donor="old", from_round=3)


def piece(value: float) -> FragmentState:
    live = {"w": torch.full((4,), value)}
    return FragmentState(Layout.of({"w": (4,)}), live, error_feedback=False)


def rank(*pieces: FragmentState, phase: str = "running", entering: Any = ()) -> Any:
    """A rank of two pieces, in a run that a site enters."""
    told: list[list[Any]] = []
    return SimpleNamespace(
        rank=SimpleNamespace(
            states=list(pieces), place=SimpleNamespace(site="new", stage=0, shard=0)
        ),
        outer=SimpleNamespace(landed=[-1] * len(pieces), status=LoopStatus()),
        control=SimpleNamespace(news=SimpleNamespace(phase=phase, entering=list(entering))),
        background=SimpleNamespace(submit=lambda call: call()),
        client=SimpleNamespace(show_pieces=told.append),
        told=told,
    )


def shown_by(own: Any) -> ShownPieces:
    """What this rank tells."""
    return ShownPieces(own, own.control, own.client, own.background)


def test_what_is_agreed_has_the_same_digest_at_both_ends() -> None:
    donor, receiver = piece(1.0), piece(2.0)
    donor.momentum.fill_(0.25)
    assert receiver.digest_of(donor.agreed()) == donor.digest()
    assert receiver.digest_of(donor.agreed()) != receiver.digest()
    with pytest.raises(ExchangeError, match="no anchor of 128 values"):
        receiver.digest_of({"anchor": torch.zeros(4)})


def test_every_version_is_told_once_to_those_who_enter() -> None:
    own = rank(piece(1.0), piece(2.0))
    shown = shown_by(own)
    shown.tell()
    assert own.told == [], "nobody enters"
    own.control.news.entering = [ENTRY]
    shown.tell()
    shown.tell()
    assert [[each.piece for each in told] for told in own.told] == [[0, 1]]
    assert own.told[0][1].sha256 == piece(2.0).digest()
    own.outer.landed[1] = 3
    shown.tell()
    assert [(each.piece, each.landed) for each in own.told[-1]] == [(1, 3)]
    # Another site: what was told may have been forgotten in between.
    own.control.news.entering = [ENTRY.model_copy(update={"from_round": 5})]
    shown.tell()
    assert [each.piece for each in own.told[-1]] == [0, 1]


def test_at_the_start_nothing_is_told() -> None:
    own = rank(piece(1.0), phase="starting", entering=[ENTRY])
    shown_by(own).tell()
    assert own.told == []


class Entered:
    """A rank that enters, with a coordinator that knows what most hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *others: str) -> None:
        monkeypatch.setattr(anchor_digests, "PAUSE", 0.0)
        monkeypatch.setattr(JoiningSite, "_fetch", self._fetch)
        self.true, self.others, self.donor = piece(1.0), list(others), "old"
        self.own = rank(piece(0.0), piece(0.0), entering=[ENTRY])
        self.own.client = SimpleNamespace(check_pieces=self._check, ready=self._ready)
        self.own.outer.adopt = self._adopt
        self.asked: bool | None = None
        """Whether all had come when it asked last."""
        self.settled, self.adopted, self.fetches, self.readies = True, list[int](), list[str](), 0
        form: Any = lambda *_: None  # noqa: E731
        own = self.own
        self.joining_site = JoiningSite(own, own.control, own.client, ENTRY, form, 1.0)

    def _fetch(self, joining_site: Any = None) -> Any:
        self.fetches.append(self.donor)
        return None

    def _adopt(self, snapshot: Snapshot) -> None:
        self.adopted.append(snapshot.piece)
        self.own.outer.status.mark_arrived(snapshot.piece)

    def _ready(self) -> None:
        assert not self.own.outer.status.awaiting
        self.readies += 1

    def _check(self, entry: Entering, pieces: Any, all_came: bool) -> CheckPiecesReply:
        assert entry.donor is not None
        self.asked = all_came
        if not self.settled:
            return CheckPiecesReply(same=[], different=[], donor=self.donor)
        same = [each.piece for each in pieces if each.sha256 == self.true.digest()]
        different = [each.piece for each in pieces if each.piece not in same]
        if different:
            left = self.others.pop(0) if self.others else None
            if left is not None:
                entry = ENTRY.model_copy(update={"donor": left})
                self.own.control.news.entering = [entry]
                self.donor = left
            return CheckPiecesReply(same=same, different=different, donor=left)
        return CheckPiecesReply(same=same, different=[], donor=entry.donor)

    def arrives(self, number: int, value: float | None = None) -> None:
        """A piece comes, true or with its anchor at `value`."""
        state = self.true if value is None else piece(value)
        self.joining_site._take(
            self.joining_site._tries, Snapshot(number, 9, dict(state.agreed()), "", 2)
        )
        self.joining_site.adopt()


def test_a_piece_is_taken_over_when_most_hold_the_same_and_not_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entered = Entered(monkeypatch)
    entered.settled = False
    entered.arrives(0)
    entered.arrives(1)
    entered.joining_site._is_through(0)
    entered.joining_site.adopt()
    assert (entered.adopted, entered.readies) == ([], 0)
    assert "too few active sites have told" not in caplog.text
    monkeypatch.setattr(anchor_digests, "LONG", -1.0)
    entered.joining_site.adopt()
    entered.joining_site.adopt()
    assert caplog.text.count("2 pieces have arrived, but too few active sites have reported") == 1
    entered.settled = True
    entered.joining_site.adopt()
    entered.joining_site.adopt()
    assert (entered.adopted, entered.readies) == ([0, 1], 1)


def test_a_false_piece_is_not_taken_over_and_comes_from_another_donor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = Entered(monkeypatch, "other")
    entered.arrives(0)
    entered.arrives(1, value=7.0)
    assert entered.adopted == [0]
    assert entered.own.outer.status.awaiting == {1}
    entered.joining_site.adopt()
    assert entered.fetches == ["old", "other"]
    entered.arrives(1)
    entered.joining_site._is_through(0)
    entered.joining_site.adopt()
    assert (entered.adopted, entered.readies) == ([0, 1], 1)


def test_without_another_donor_the_entry_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = Entered(monkeypatch)
    with pytest.raises(TrainingError, match="the state that old gave is not the one that most"):
        entered.arrives(0, value=7.0)


def test_tensors_of_another_piece_are_no_state_of_most(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = Entered(monkeypatch, "other")
    snapshot = Snapshot(0, 9, {"anchor": torch.zeros(3), "momentum": torch.zeros(3)})
    entered.joining_site._checks.add(snapshot)
    assert entered.joining_site._checks._waiting[0][1].sha256 == UNFIT


def test_what_comes_at_the_start_is_taken_over_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """All take theta_0 from the founder, and who is ready may be counted in before it looks."""
    entered = Entered(monkeypatch)
    entered.own.control.news.phase = "starting"
    entered.settled = False
    entered.own.outer.status.expect({0, 1})
    entered.own.client.ready = lambda: None
    for number in (0, 1):
        entered.joining_site._take(0, Snapshot(number, 0, dict(piece(5.0).agreed()), ""))
    entered.joining_site._is_through(0)
    entered.own.control.news.phase = "running"
    entered.joining_site.adopt()
    assert entered.adopted == [0, 1]


def test_what_the_others_have_left_behind_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entered = Entered(monkeypatch)
    entered.arrives(0)
    entered.settled = False
    entered.arrives(1)
    assert entered.asked is False
    entered.joining_site._is_through(0)
    entered.joining_site.adopt()
    assert entered.asked is True
    assert entered.fetches == ["old"]
    again = ENTRY.model_copy(update={"renewals": 1})
    entered.own.control.news.entering = [again]
    entered.joining_site.adopt()
    entered.joining_site.adopt()
    assert entered.fetches == ["old", "old"]
    assert "old gave what the others have left behind: fetching from old" in caplog.text
    assert entry_name(again, 0, 0) != entry_name(ENTRY, 0, 0)
    entered.settled = True
    entered.joining_site._tries += 1
    entered.arrives(1)
    assert (entered.adopted, entered.readies) == ([0, 1], 0)
    entered.joining_site._is_through(1)
    entered.joining_site.adopt()
    assert (entered.adopted, entered.readies) == ([0, 1], 1)
