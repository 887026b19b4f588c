"""When fragments reach their boundaries and land: slot ends, counted in whole numbers.

A tick is the number of slots that have ended since the run began. A fragment's boundary is at
the end of one slot of every round; what it sent lands `delay` slots later by the plan of the round
of the boundary, which may be in the next round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dilocox.errors import ConfigError


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


def boundary_slots(stage: int, stages: int, fragments: int, slots: int) -> list[int]:
    """Slot, 1 to `slots`, at whose end each fragment of `stage` has its boundary.

    The boundaries of all fragments of all stages are spread evenly over the round, because the
    stages of a site share its uplink: fragment after fragment, and stage after stage for each.
    The very last one is at the round's end. Raises `ConfigError` for numbers out of range.
    """
    if not 0 <= stage < stages or fragments < 1 or slots < 1:
        raise ConfigError(
            f"no boundaries for stage {stage} of {stages}, {fragments} fragments and {slots} slots"
        )
    count = fragments * stages
    return [-(-(number * stages + stage + 1) * slots // count) for number in range(fragments)]


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
