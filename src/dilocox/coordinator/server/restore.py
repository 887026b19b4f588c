"""The state of a run from its event log: from the newest snapshot that serves, and what follows."""

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
    """What the events add up to. Raises `TrainingError` for what cannot be read."""
    number, state = start_of(config, events, events.last, lambda state: True)
    for event in events.events(number):
        state.apply(event)
    return state


def start_of(
    config: RunConfig, events: EventLog, until: int, serves: Callable[[CoordinatorState], bool]
) -> tuple[int, CoordinatorState]:
    """Number of the last event in the newest snapshot up to event `until` that `serves`, and its
    state; else 0 and the state of a run that begins."""
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
    """Takes snapshots as the event log grows."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._next = events.last + snapshots.EVENTS

    def take(self, state: CoordinatorState) -> None:
        """Keep `state`, which the log adds up to, if it is time. A disk that is full keeps that
        from happening for a while, and nothing else."""
        if self._events.last < self._next:
            return
        self._next = self._events.last + snapshots.EVENTS
        try:
            self._events.add_snapshot(snapshots.code(), snapshots.packed(state), snapshots.KEPT)
        except TrainingError as error:
            log.warning("%s", error)
        except Exception as error:  # a shortcut must not end what it is to shorten
            log.error("%s: no snapshot was made (%r)", self._events.path, error)
