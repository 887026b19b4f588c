"""The run as the coordinator's services share it: state, event log, clocks, and `append`.

A service that appends an event sees the state after that event and after all that follows from it.
"""

from __future__ import annotations

from collections.abc import Callable

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.restore import Snapshots
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.coordinator.server.transitions import decide

Happened = Callable[[e.Event, int, int], None]
"""(event that was logged and applied, `sequence` and `epoch` of the state before it)."""


class RunLog:
    """The state of a run, and the log of the events that the state adds up to."""

    def __init__(
        self,
        state: CoordinatorState,
        log: EventLog,
        wait_for: int,
        now: Callable[[], float],
        wall: Callable[[], float],
        deciding: Callable[[e.Event], None],
        happened: Happened,
    ) -> None:
        """`wait_for`: sites that the run begins with. `deciding` is called before an event is
        logged: an error that it raises keeps the event out of the log. `happened` is called after
        the event was applied."""
        self.state, self.log = state, log
        self.now, self.wall = now, wall
        """A monotonic clock, and the one that stamps events; both in seconds."""
        self._wait_for = wait_for
        self._deciding, self._happened = deciding, happened
        self._snapshots = Snapshots(log)

    def append(self, event: e.Event, key: str | None = None) -> None:
        """Log and apply an event and all that follows from it. `key`: the only exchange that the
        event can have decided. Raises `TrainingError` if the log cannot be written."""
        self._apply(event)
        self.follow(key)
        self._snapshots.take(self.state)

    def follow(self, key: str | None = None) -> None:
        """Log and apply all that follows from the state. `key`: see `append`."""
        while (event := decide(self.state, self._wait_for, self.wall(), key)) is not None:
            if not isinstance(event, e.Fetching | e.Decided | e.Retried):
                key = None
            self._apply(event)

    def _apply(self, event: e.Event) -> None:
        sequence, epoch = self.state.sequence, self.state.epoch
        self._deciding(event)
        self.log.append(event)
        self.state.apply(event)
        self._happened(event, sequence, epoch)
