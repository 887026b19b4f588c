"""Restores the state of a run: the newest usable snapshot, and the events of the log after it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.server import snapshots
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.errors import TrainingError

log = logging.getLogger(__name__)


def restored(config: RunConfig, events: EventLog) -> CoordinatorState:
    """Return the state after all events. Raises `TrainingError` if an event cannot be read."""
    number, state = start_of(config, events, events.last, lambda state: True)
    for event in events.events(number):
        state.apply(event)
    return state


def start_of(
    config: RunConfig, events: EventLog, until: int, serves: Callable[[CoordinatorState], bool]
) -> tuple[int, CoordinatorState]:
    """Return the number of an event, and the state after it from which to replay.

    The state is that of the newest snapshot up to event `until` for which `serves` is true. Without
    such a snapshot, the result is 0 and the state of a new run.
    """
    for number, data in events.snapshots(snapshots.code(), until):
        try:
            state = snapshots.unpacked(config, data)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s: the snapshot at event %d is left out (%r)", events.path, number, error)
            continue
        if serves(state):
            return number, state
    return 0, CoordinatorState(config)


class Snapshots:
    """Stores a snapshot of the state every `snapshots.EVENTS` events."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._next = events.last + snapshots.EVENTS

    def take(self, state: CoordinatorState) -> None:
        """Store a snapshot of `state`, the state after the last event, if one is due.

        An error, such as a full disk, is logged; the next snapshot is tried when it is due.
        """
        if self._events.last < self._next:
            return
        self._next = self._events.last + snapshots.EVENTS
        try:
            self._events.add_snapshot(snapshots.code(), snapshots.packed(state), snapshots.KEPT)
        except TrainingError as error:
            log.warning("%s", error)
        except Exception as error:  # A snapshot only saves time, so it must not end the run.
            log.error("%s: no snapshot was made (%r)", self._events.path, error)
