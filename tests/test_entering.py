"""How a site that enters follows the rounds, without a model and a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox import entering
from dilocox.entering import Newcomer
from dilocox.outer.coordinator.messages import Entering
from dilocox.outer.pending import Counts

ENTRY = Entering(site="new", incarnation=1, donor="old", from_round=3)


class Followed:
    """A trainer whose rounds are only counted, in a run that starts after some looks."""

    me = "new"

    def __init__(self, phases: list[str]) -> None:
        self.phases, self.asked, self.ends, self.touched = phases, 0, list[tuple[int, str]](), 0
        self.at = SimpleNamespace(round=0, slot=0, tick=0)
        self.config = SimpleNamespace(shares_moments=True)
        state = SimpleNamespace(anchor=torch.zeros(1))
        self.rank = SimpleNamespace(
            states=[state],
            place=SimpleNamespace(site="new", stage=0, shard=0),
            model=SimpleNamespace(sync_tied=lambda moments: None),
        )
        self.control = SimpleNamespace(touch=self._touch, hurry=lambda: None)
        self.outer = SimpleNamespace(
            awaiting=set(), end_of_slot=self._end_of_slot, reset_to_anchor=lambda: None,
            counts=Counts(wait_seconds=7.0, exchanges=3),
        )  # fmt: skip
        self.client = SimpleNamespace(poll_plan=self._plan, ready=lambda: None)

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
        return SimpleNamespace(plan=plan, receive=False)


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All has come already, and nobody needs to pause."""
    monkeypatch.setattr(entering, "PAUSE", 0.0)
    monkeypatch.setattr(Newcomer, "_fetch", lambda self: None)
    monkeypatch.setattr(Newcomer, "adopt", lambda self: self._trainer.outer.awaiting.clear())


def test_nothing_is_followed_before_the_run_has_started() -> None:
    """A resumed run has plans from the start; the site asks on, and lives."""
    followed: Any = Followed(["starting"] * 3 + ["running"])

    class Control(SimpleNamespace):
        looks = 0

        @property
        def news(self) -> Any:
            phase = followed.phases[min(followed.asked, len(followed.phases) - 1)]
            return SimpleNamespace(phase=phase, entering=[])

    followed.control = Control(touch=followed._touch, hurry=lambda: None)
    Newcomer(followed, ENTRY, lambda *_: None, 1.0).follow()  # type: ignore[arg-type, return-value]
    assert followed.ends == [(3, "running")]
    assert followed.asked == 3 + 2
    assert followed.touched >= 3
    assert followed.at.round == 4


def test_what_was_waited_for_on_the_way_is_not_in_the_first_round() -> None:
    followed: Any = Followed(["running"])
    followed.control.news = SimpleNamespace(phase="running", entering=[])
    Newcomer(followed, ENTRY, lambda *_: None, 1.0).follow()  # type: ignore[arg-type, return-value]
    assert followed.outer.counts == Counts()
