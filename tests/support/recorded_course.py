"""The whole course of boundaries and landings, worked out from the plans: what tests compare with.

The outer loop keeps what is under way instead, because a landing may wait for its data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dilocox.coordinator.protocol.round_plan import boundary_slots


@dataclass(frozen=True)
class Timing:
    """The numbers of one round's plan that say when things happen."""

    round: int
    first_tick: int
    """Slots before the round: its slot s, from 1, ends at tick first_tick + s."""
    slots: int
    fragments: int
    delay: int


@dataclass(frozen=True)
class Event:
    """A boundary of a fragment, or the landing of what it sent at `round`'s boundary."""

    kind: Literal["landing", "boundary"]
    tick: int
    round: int
    fragment: int


def events_at(tick: int, timings: Iterable[Timing], stage: int, stages: int) -> list[Event]:
    """What happens at the slot end `tick` in `stage`, in order.

    First the landings of earlier boundaries in order of round and fragment, then the boundaries
    in order of fragment, then (with a delay of 0) these boundaries' own landings. `timings` must
    hold every round whose boundaries can land at `tick`.
    """
    landings: list[Event] = []
    boundaries: list[Event] = []
    immediate: list[Event] = []
    for timing in timings:
        slots = boundary_slots(stage, stages, timing.fragments, timing.slots)
        for fragment, slot in enumerate(slots):
            boundary = timing.first_tick + slot
            if boundary == tick:
                boundaries.append(Event("boundary", tick, timing.round, fragment))
            if boundary + timing.delay == tick:
                event = Event("landing", tick, timing.round, fragment)
                (landings if timing.delay else immediate).append(event)
    return landings + boundaries + immediate


def landings_after(tick: int, timings: Iterable[Timing], stage: int, stages: int) -> list[Event]:
    """What has had its boundary by `tick` and lands later: to be landed before a flush, in order.

    After the last round `tick` is its end.
    """
    found = []
    for timing in timings:
        slots = boundary_slots(stage, stages, timing.fragments, timing.slots)
        for fragment, slot in enumerate(slots):
            boundary = timing.first_tick + slot
            if boundary <= tick < boundary + timing.delay:
                found.append(Event("landing", boundary + timing.delay, timing.round, fragment))
    return sorted(found, key=lambda event: (event.tick, event.round, event.fragment))
