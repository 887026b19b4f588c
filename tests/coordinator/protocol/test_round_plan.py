"""Boundaries and landings by tick."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.errors import ConfigError
from tests.support.recorded_course import Event, Timing, events_at, landings_after

pytestmark = pytest.mark.waits


def rounds(count: int, slots: int, fragments: int, delay: int) -> list[Timing]:
    return [Timing(number, number * slots, slots, fragments, delay) for number in range(count)]


def course(timings: list[Timing], ticks: int) -> list[Event]:
    return [e for tick in range(1, ticks + 1) for e in events_at(tick, timings, 0, 1)]


def test_boundaries_are_staggered_over_fragments_and_stages() -> None:
    assert boundary_slots(0, 1, 1, 7) == [7]
    assert boundary_slots(0, 1, 4, 20) == [5, 10, 15, 20]
    assert boundary_slots(0, 2, 4, 16) == [2, 6, 10, 14]
    assert boundary_slots(1, 2, 4, 16) == [4, 8, 12, 16]
    assert boundary_slots(0, 2, 1, 1) == boundary_slots(1, 2, 1, 1) == [1]


@given(
    stages=st.integers(1, 5),
    fragments=st.integers(1, 6),
    slots=st.integers(1, 40),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_boundaries_are_in_the_round_and_evenly_spread(
    stages: int, fragments: int, slots: int
) -> None:
    every = sorted(s for j in range(stages) for s in boundary_slots(j, stages, fragments, slots))
    assert len(every) == stages * fragments
    assert every[0] >= 1
    assert every[-1] == slots
    steps = [after - before for before, after in zip([0, *every], every, strict=False)]
    assert max(steps) <= -(-slots // (stages * fragments))
    assert min(steps) >= slots // (stages * fragments)


@pytest.mark.parametrize("delay", [0, 1, 3, 6])
def test_everything_lands_once_after_its_delay(delay: int) -> None:
    timings = rounds(5, slots=6, fragments=3, delay=delay)
    events = course(timings, 30)
    boundaries = {(e.round, e.fragment): e.tick for e in events if e.kind == "boundary"}
    landings = {(e.round, e.fragment): e.tick for e in events if e.kind == "landing"}
    later = landings_after(30, timings, 0, 1)
    assert len(boundaries) == 15
    assert len(landings) + len(later) == 15
    assert len([e for e in events if e.kind == "landing"]) == len(landings)
    for event in later:
        assert event.tick > 30
        landings[event.round, event.fragment] = event.tick
    assert landings == {key: tick + delay for key, tick in boundaries.items()}
    assert [e.tick for e in later] == sorted(e.tick for e in later)


def test_order_at_a_slot_end() -> None:
    """Landings of what was sent before, then boundaries, then landings without delay."""
    whole = rounds(2, slots=4, fragments=1, delay=4)
    assert events_at(8, whole, 0, 1) == [
        Event("landing", 8, 0, 0),
        Event("boundary", 8, 1, 0),
    ]
    waiting = rounds(2, slots=4, fragments=1, delay=0)
    assert events_at(8, waiting, 0, 1) == [
        Event("boundary", 8, 1, 0),
        Event("landing", 8, 1, 0),
    ]
    crowded = rounds(1, slots=1, fragments=2, delay=0)
    assert [(e.kind, e.fragment) for e in events_at(1, crowded, 0, 1)] == [
        ("boundary", 0),
        ("boundary", 1),
        ("landing", 0),
        ("landing", 1),
    ]


def test_a_changed_plan_keeps_the_delay_of_the_boundary() -> None:
    timings = [Timing(0, 0, 4, 1, 3), Timing(1, 4, 6, 1, 1)]
    assert course(timings, 11) == [
        Event("boundary", 4, 0, 0),
        Event("landing", 7, 0, 0),
        Event("boundary", 10, 1, 0),
        Event("landing", 11, 1, 0),
    ]


@pytest.mark.parametrize("numbers", [(1, 1, 1, 1), (-1, 1, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_impossible_numbers_are_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="no boundaries for stage"):
        boundary_slots(*numbers)


def test_stages_have_their_own_ticks() -> None:
    timings = rounds(1, slots=4, fragments=1, delay=1)
    ticks = {
        stage: [e.tick for tick in range(1, 6) for e in events_at(tick, timings, stage, 2)]
        for stage in (0, 1)
    }
    assert ticks == {0: [2, 3], 1: [4, 5]}
    assert landings_after(4, timings, 0, 2) == []
    assert landings_after(4, timings, 1, 2) == [Event("landing", 5, 0, 0)]
