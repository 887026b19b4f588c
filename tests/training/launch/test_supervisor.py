"""A site that is started again after a crash, and when it is not: with a clock that is told."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.network import NetworkSection
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import ConfigError, JoinError, RetryLaterError
from dilocox.training.launch.supervisor import FRUITLESS, Asked, Ended, keep_in_run, listening
from dilocox.utils.backoff import backoff_delays

pytestmark = pytest.mark.waits

LIMITS = Timeouts.derive(NetworkSection(link_timeout=20.0, heartbeat=5.0))
CRASH = Ended(1, "lyon-stage1-shard0 was killed (signal 9)")
UNKNOWN = RetryLaterError("coordinator there:1: no answer")


class Play:
    """Incarnations that end as they are told, or errors that they begin with."""

    def __init__(self, *ends: Ended | Exception, asked_at: int = 10**9) -> None:
        self.said: list[str] = []
        self.slept: list[float] = []
        self.time = 0.0
        self.starts = 0
        self._ends: Iterable[Any] = iter(ends)
        self._asked_at = asked_at

    def start(self) -> Ended:
        self.starts += 1
        end = next(self._ends)  # type: ignore[call-overload]
        if isinstance(end, Exception):
            raise end
        return end

    def sleep(self, seconds: float) -> bool:
        self.time += seconds
        self.slept.append(seconds)
        return len(self.slept) >= self._asked_at

    def run(self) -> Ended:
        return keep_in_run(
            "lyon", self.start, LIMITS, self.said.append, lambda: self.time, self.sleep
        )


def test_a_crash_is_followed_by_another_start_until_the_run_is_done() -> None:
    play = Play(CRASH, CRASH, Ended(0))
    assert play.run() == Ended(0)
    assert play.starts == 3
    assert play.said.count(CRASH.reason) == 2
    # Each had taken part, so each pause is a first one: between half of a beat and a whole one.
    assert all(LIMITS.retry / 2 <= pause <= LIMITS.retry for pause in play.slept)
    assert any(line.startswith("site lyon joins again in ") for line in play.said)


@pytest.mark.parametrize("code", [0, 130])
def test_who_is_done_or_asked_to_go_stays_away(code: int) -> None:
    play = Play(Ended(code))
    assert (play.run().code, play.starts, play.said) == (code, 1, [])


def test_an_error_of_the_first_start_is_raised() -> None:
    for error in (
        UNKNOWN,
        JoinError("token: not a token of this run"),
        ConfigError("ports: taken"),
    ):
        play = Play(error)
        with pytest.raises(type(error)):
            play.run()
        assert play.starts == 1


def test_what_would_fail_again_is_not_tried_again() -> None:
    failed = Ended(1, "the run has failed: loss is not finite", permanent=True)
    play = Play(CRASH, failed)
    assert play.run() == failed
    refused = Play(CRASH, JoinError("site lyon: the run is finished; resume it to go on"))
    with pytest.raises(JoinError, match="the run is finished"):
        refused.run()
    assert refused.starts == 2


def test_incarnations_that_never_take_part_are_counted() -> None:
    early = Ended(1, "out of memory", took_part=False)
    play = Play(CRASH, *[early] * (FRUITLESS - 1), CRASH, *[early] * FRUITLESS)
    end = play.run()
    assert end.permanent
    assert f"failed {FRUITLESS} times in a row before it took part" in end.reason
    assert "out of memory" in end.reason
    assert play.starts == 1 + FRUITLESS - 1 + 1 + FRUITLESS
    # A port that is still held counts as such a start: the first one got past it.
    held = Play(CRASH, ConfigError("sites.lyon.ports: taken"), Ended(0))
    assert held.run() == Ended(0)


def test_a_coordinator_that_is_away_is_looked_for_and_named_in_the_end() -> None:
    play = Play(CRASH, *itertools.repeat(UNKNOWN, 1000))
    end = play.run()
    assert end.permanent
    assert end.reason.startswith(f"site lyon: gave up after {LIMITS.rejoin:g} s (coordinator there")
    assert LIMITS.rejoin < play.time <= LIMITS.rejoin + LIMITS.retry_most
    assert max(play.slept) <= LIMITS.retry_most
    back = Play(CRASH, UNKNOWN, UNKNOWN, CRASH, Ended(0))
    assert back.run() == Ended(0)


def test_a_site_that_waits_can_be_asked_to_go() -> None:
    play = Play(CRASH, UNKNOWN, asked_at=2)
    assert play.run().code == 130


def test_signals_of_one_moment_are_one_request() -> None:
    """As `make` passes on the SIGTERM that its child has received already."""
    clock = [0.0]
    asked = Asked(now=lambda: clock[0])
    for clock[0], times in ((0.0, 1), (0.1, 1), (1.9, 1), (2.0, 2), (3.9, 2), (9.0, 3)):
        asked(signal.SIGTERM, None)
        assert asked.times == times
    interrupts = Asked(second_interrupts=True, now=lambda: clock[0])
    interrupts(signal.SIGTERM, None)
    interrupts(signal.SIGTERM, None)
    clock[0] += 2.0
    with pytest.raises(KeyboardInterrupt):
        interrupts(signal.SIGINT, None)


def test_handlers_of_the_caller_stay_in_place() -> None:
    def own(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with listening() as asked:
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGINT) is asked
        with ThreadPoolExecutor(1) as pool, listening():
            pool.submit(listening().__enter__).result()
    finally:
        signal.signal(signal.SIGTERM, before)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(0.01, 10.0), st.floats(1.0, 100.0), st.floats(0.0, 1.0))
def test_pauses_double_up_to_a_limit(first: float, times: float, where: float) -> None:
    made = list(
        itertools.islice(backoff_delays(first, first * times, lambda a, b: a + where * (b - a)), 9)
    )
    share = 0.5 + where / 2
    for number, pause in enumerate(made):
        assert pause == pytest.approx(share * min(first * 2**number, first * times))


def test_pauses_differ() -> None:
    assert len(set(itertools.islice(backoff_delays(1.0, 8.0), 20))) == 20
