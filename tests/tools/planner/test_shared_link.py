"""A link shared evenly: by hand, and what must hold for any load."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.tools.planner.shared_link import SharedLink


def play(rate: float, transfers: list[tuple[float, float]]) -> list[float]:
    """When each (start, size) is through."""
    events: list[tuple[float, int, Callable[[], None]]] = []
    ends = [0.0] * len(transfers)
    count = 0
    now = 0.0

    def at(when: float, act: Callable[[], None]) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (when, count, act))

    link = SharedLink(rate, at)

    def begin(number: int) -> None:
        def ended() -> None:
            ends[number] = now

        link.add(transfers[number][1], now, ended)

    for number, (start, _) in enumerate(transfers):
        at(start, lambda number=number: begin(number))  # type: ignore[misc]
    while events:
        now, _, act = heapq.heappop(events)
        act()
    return ends


def test_by_hand() -> None:
    assert play(10.0, [(0.0, 100.0)]) == [10.0]
    assert play(10.0, [(0.0, 100.0), (0.0, 100.0)]) == [20.0, 20.0]
    # Alone for 5 s, then half each until the second is through, then alone again.
    assert play(10.0, [(0.0, 100.0), (5.0, 20.0)]) == [pytest.approx(12.0), pytest.approx(9.0)]
    # After a pause the link is as new.
    assert play(10.0, [(0.0, 100.0), (50.0, 100.0)]) == [10.0, 60.0]
    assert play(10.0, [(3.0, 0.0)]) == [3.0]


LOADS = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 1000)), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(LOADS, st.floats(0.5, 50))
def test_nobody_is_faster_than_alone_and_the_link_never_idles(
    load: list[tuple[float, float]], rate: float
) -> None:
    ends = play(rate, load)
    for (start, size), end in zip(load, ends, strict=True):
        assert end >= start + size / rate * (1 - 1e-9) - 1e-9
    # Work is conserved: the last end is that of a queue, whatever the order.
    free = 0.0
    for start, size in sorted(load):
        free = max(free, start) + size / rate
    assert max(ends) == pytest.approx(free, rel=1e-6)
