"""The budget of an uplink holds at every moment, whoever sends."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from tests.support.manual_clock import ManualClock

from dilocox.tools.storage.uplink import Uplink


@given(
    rate=st.integers(1, 10**9),
    sizes=st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 100)), min_size=1, max_size=30),
)
def test_the_rate_holds(rate: int, sizes: list[tuple[int, float]]) -> None:
    clock = ManualClock(100.0)
    uplink = Uplink(rate, clock, clock.sleep)
    sent = []
    for size, pause in sizes:
        clock.now += pause
        uplink.take(size)
        sent.append((clock.now, size))
    # From any call to any later one: what was sent before the latter fits into the time between.
    for first in range(len(sent)):
        totals = list(accumulate(size for _, size in sent[first:]))
        for (now, _), total in zip(sent[first + 1 :], totals, strict=False):
            assert total <= (now - sent[first][0]) * rate * (1 + 1e-9) + 1e-6 * rate


def test_a_whole_upload_takes_its_time() -> None:
    clock = ManualClock(100.0)
    uplink = Uplink(1000, clock, clock.sleep)
    for _ in range(11):
        uplink.take(500)
    assert clock.now == 105.0


def test_without_a_limit_nobody_waits() -> None:
    Uplink(None, sleep=lambda seconds: 1 / 0).take(10**12)
