"""State, event log and clocks of a run, shared by the coordinator's services.

A service changes the run only by `append`. When `append` returns, the event and all events that
follow from it have been applied to the state.
"""

from __future__ import annotations

from collections.abc import Callable

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.restore import Snapshots
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.coordinator.server.transitions import decide

Happened = Callable[[e.Event, int, int], None]
"""Callback after an event was logged and applied. Its arguments are the event, and `sequence` and
`epoch` of the state before the event."""


class RunLog:
    """The state of a run, and the log of the events that produced the state."""

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
        """Share `state`, whose events are in `log`.

        Args:
            state: State after all events of the log.
            log: The event log.
            wait_for: Number of sites that the run starts with.
            now: Monotonic clock, in seconds.
            wall: Clock that stamps events, in Unix seconds.
            deciding: Called before an event is logged. If it raises, the event is not logged.
            happened: Called after an event was applied.
        """
        self.state, self.log = state, log
        self.now, self.wall = now, wall
        self._wait_for = wait_for
        self._deciding, self._happened = deciding, happened
        self._snapshots = Snapshots(log)

    def append(self, event: e.Event, key: str | None = None) -> None:
        """Log and apply an event and all events that follow from it.

        `key` names the only exchange that the event can complete; None: it may be any. Raises
        `TrainingError` if the log cannot be written.
        """
        self._apply(event)
        self.follow(key)
        self._snapshots.take(self.state)

    def follow(self, key: str | None = None) -> None:
        """Log and apply all events that follow from the state. `append` explains `key`."""
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
