"""What a rank's beats bring back, and what happens when nobody listens to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.coordinator.client import heartbeat as control_module
from dilocox.coordinator.client.errors import SiteGoneError
from dilocox.coordinator.client.heartbeat import RankControl
from dilocox.coordinator.protocol.messages import BeatReply, Epoch
from dilocox.errors import DilocoxError, TrainingError

pytestmark = pytest.mark.waits

PATIENCE = 0.05
LONG = 60.0
"""Seconds of patience with a loop that takes notice: no busy machine uses them up."""


def reply(**changes: Any) -> BeatReply:
    fields: dict[str, Any] = {
        "phase": "running",
        "reason": "",
        "role": "active",
        "donor": None,
        "founder": "a",
        "lease": 4,
        "stop_tick": None,
        "epoch": Epoch(id=3, members=[]),
        "entering": [],
    }
    return BeatReply(**{**fields, **changes})


class Coordinator:
    """Answers every beat with `answer`, a reply or an error."""

    def __init__(self) -> None:
        self.answer: BeatReply | Exception = reply()
        self.beats: list[tuple[int, int, int]] = []
        self.built: list[bool] = []
        """Of every beat, whether the model was there."""
        self.beaten = threading.Condition()

    def beat(
        self, tick: int, round_: int, slot: int, slot_seconds: float | None = None
    ) -> BeatReply:
        self.built.append(True)
        with self.beaten:
            self.beats.append((tick, round_, slot))
            self.beaten.notify_all()
        return self.answered()

    def building(self) -> BeatReply:
        with self.beaten:
            self.built.append(False)
            self.beaten.notify_all()
        return self.answered()

    def answered(self) -> BeatReply:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.beaten:
            assert self.beaten.wait_for(condition, 10.0)


@contextmanager
def started(
    coordinator: Coordinator,
    stall: float = 60.0,
    every: float = 0.005,
    building: bool = False,
    patience: float = PATIENCE,
) -> Iterator[tuple[RankControl, list[DilocoxError], threading.Event]]:
    stuck: list[DilocoxError] = []
    said = threading.Event()

    def on_stuck(error: DilocoxError) -> None:
        stuck.append(error)
        said.set()

    control = RankControl(coordinator, every, stall, patience, on_stuck)
    control.start(building=building)
    try:
        yield control, stuck, said
    finally:
        control.close()


def test_the_position_is_beaten_and_the_lease_obeyed() -> None:
    coordinator = Coordinator()
    with started(coordinator) as (control, _, _):
        assert control.epoch() == 3
        assert control.may_finish(4)
        control.at(3, 1, 1, 0.5)
        coordinator.wait(lambda: (3, 1, 1) in coordinator.beats)
        allowed: list[bool] = []
        waiter = threading.Thread(target=lambda: allowed.append(control.may_finish(6)))
        waiter.start()
        # Asked again and again while the lease does not reach.
        seen = len(coordinator.beats)
        coordinator.wait(lambda: len(coordinator.beats) > seen + 3)
        assert not allowed
        coordinator.answer = reply(lease=9)
        waiter.join(10.0)
        assert allowed == [True]


def test_a_lease_that_would_be_used_up_before_the_next_answer_is_asked_for_early() -> None:
    """On a link full of payloads the answer takes seconds: training would stand still for them."""
    coordinator = Coordinator()
    with started(coordinator, every=60.0) as (control, _, _):
        control.at(1, 0, 1, 10.0)
        # Four slots of 10 s are left of the lease, and the next beat is due in 60.
        coordinator.answer = reply(lease=20)
        before = len(coordinator.beats)
        assert control.may_finish(2)
        coordinator.wait(lambda: len(coordinator.beats) > before)
        assert coordinator.beats[-1] == (1, 0, 1)
        while control.news.lease < 20:
            time.sleep(0.001)
        # Now there are more than are needed, and until a stop there is nothing to ask for.
        seen = len(coordinator.beats)
        assert control.may_finish(3)
        assert not control._hurry.is_set()
        assert len(coordinator.beats) == seen
        coordinator.answer = reply(lease=20, stop_tick=20)
        control.hurry()
        while control.news.stop_tick is None:
            time.sleep(0.001)
        seen = len(coordinator.beats)
        assert control.may_finish(19)
        assert not control._hurry.is_set()
        assert len(coordinator.beats) == seen


def test_a_stop_comes_before_the_lease() -> None:
    coordinator = Coordinator()
    coordinator.answer = reply(lease=9, stop_tick=5)
    with started(coordinator) as (control, _, _):
        assert control.may_finish(5)
        assert not control.may_finish(6)


def test_a_site_that_stands_at_the_stop_is_not_interrupted() -> None:
    coordinator = Coordinator()
    coordinator.answer = reply(phase="stopped", lease=5, stop_tick=5)
    with started(coordinator) as (control, _, _):
        assert not control.may_finish(6)
        assert control.news.phase == "stopped"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (SiteGoneError("lyon is gone"), "lyon is gone"),
        (reply(phase="failed", reason="no more disks"), "the run has failed: no more disks"),
        (reply(phase="finished", role="enrolled"), "finished: this site never entered"),
        (reply(phase="stopped", reason="interrupted"), "the run is stopped: interrupted"),
        (reply(phase="stopped", role="enrolled", stop_tick=5), "the run is stopped"),
    ],
)
def test_what_ends_the_run_is_raised_where_the_loop_waits(
    answer: BeatReply | DilocoxError, text: str
) -> None:
    coordinator = Coordinator()
    with started(coordinator, patience=LONG) as (control, stuck, _):
        coordinator.answer = answer
        with pytest.raises(TrainingError, match=text):
            control.may_finish(100)
        with pytest.raises(TrainingError, match=text):
            control.wait_while_role("active")
        # The loop knows: nobody needs to end it, and nobody waits for it any more.
        control._thread.join(10.0)
        assert not control._thread.is_alive()
        assert not stuck


def test_who_waits_for_a_role_asks_once_a_second() -> None:
    coordinator = Coordinator()
    coordinator.answer = reply(role="enrolled")
    with started(coordinator, every=60.0) as (control, _, _):
        waiter = threading.Thread(target=control.wait_while_role, args=("enrolled",), daemon=True)
        began = time.monotonic()
        waiter.start()
        coordinator.wait(lambda: len(coordinator.beats) >= 3)
        # The first was `start`'s. A reply asks for none.
        assert time.monotonic() - began > 1.9
        coordinator.answer = reply()
        waiter.join(10.0)
        assert not waiter.is_alive()


def test_a_loop_that_does_not_look_is_stuck() -> None:
    """Another thread that sees the error (the exchange's) is not the training loop."""
    coordinator = Coordinator()
    coordinator.answer = reply()
    with started(coordinator) as (control, stuck, said):
        coordinator.answer = SiteGoneError("lyon is gone")

        def exchange() -> None:
            with pytest.raises(SiteGoneError):
                control.may_finish(100)

        other = threading.Thread(target=exchange)
        other.start()
        assert said.wait(10.0)
        other.join(10.0)
        assert not other.is_alive()
        assert [str(error) for error in stuck] == ["lyon is gone"]


UNEXPECTED = "beats to the coordinator: ValueError: not an answer"


def test_an_unexpected_exception_of_the_beats_ends_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = Coordinator()
    with started(coordinator, patience=LONG) as (control, stuck, _):
        coordinator.answer = ValueError("not an answer")
        with pytest.raises(TrainingError, match=UNEXPECTED) as raised:
            control.may_finish(100)
        assert not raised.value.permanent, "a fresh process may have better luck"
        control._thread.join(10.0)
        assert not control._thread.is_alive()
    assert not stuck
    (said_once,) = caplog.records
    assert "have ended" in said_once.message
    assert "ValueError: not an answer" in caplog.text


def test_an_unexpected_exception_of_the_beats_ends_a_loop_that_does_not_look() -> None:
    coordinator = Coordinator()
    with started(coordinator) as (_, stuck, said):
        coordinator.answer = ValueError("not an answer")
        assert said.wait(10.0)
    assert [str(error) for error in stuck] == [UNEXPECTED]


@pytest.mark.parametrize("answer", [SiteGoneError("lyon is gone"), ValueError("closed")])
def test_closing_is_not_being_stuck(answer: Exception) -> None:
    coordinator = Coordinator()
    with started(coordinator, patience=LONG) as (control, stuck, _):
        coordinator.answer = answer
        control.close()
        assert not control._thread.is_alive()
    assert not stuck


class Clock:
    """Seconds that go on only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(control_module, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_a_loop_that_hangs_does_not_look_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, coordinator, looks = Clock(monkeypatch), Coordinator(), threading.Semaphore(0)
    monkeypatch.setattr(control_module.log, "error", lambda *_: looks.release())
    with started(coordinator, stall=60.0) as (control, _, _):
        coordinator.wait(lambda: len(coordinator.beats) >= 2)
        # Nothing touches it: beats end, within the stall and what was under way.
        clock.now += 61.0
        assert looks.acquire(timeout=10.0)
        before = len(coordinator.beats)
        for _ in range(3):
            assert looks.acquire(timeout=10.0)
        assert len(coordinator.beats) == before
        control.touch()
        coordinator.wait(lambda: len(coordinator.beats) > before)


def test_a_rank_stays_alive_while_the_run_waits_for_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks of a site wait for the one whose exchange is not decided."""
    clock = Clock(monkeypatch)

    class Waiting(Coordinator):
        def answered(self) -> BeatReply:
            clock.now += 59.0
            return reply(waits_for_sites=True)

    coordinator = Waiting()
    with started(coordinator, stall=60.0):
        # Nothing touches it, for many times the stall.
        coordinator.wait(lambda: len(coordinator.beats) > 5)
    assert clock.now > 5 * 59.0


def test_a_rank_beats_while_its_model_is_built() -> None:
    coordinator = Coordinator()
    with started(coordinator, building=True) as (control, _, _):
        coordinator.wait(lambda: len(coordinator.built) >= 3)
        assert not coordinator.beats
        control.built()
        coordinator.wait(lambda: len(coordinator.beats) >= 2)
    assert coordinator.built.index(True) == coordinator.built.count(False)
