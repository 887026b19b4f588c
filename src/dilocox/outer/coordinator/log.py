"""The event log: one SQLite file, appended to before an event takes effect."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from dilocox.errors import TrainingError
from dilocox.outer.coordinator import events as e

FORMAT = 1
NAME = "coordinator.sqlite"
# Everything survives the death of the process. The death of the machine may take the last moments
# of these kinds, which are many and cheap to lose: votes are sent again, and a decision that all
# voters have heard is not asked for again. Epochs, plans, leases and stops wait for the disk. What
# does not wait may get there all the same: what the record needs of a decision is there before it.
_SOFT = (
    e.Pinned, e.Voted, e.Broke, e.Decided, e.Ready, e.RoundDone, e.Wrote, e.Reported, e.Stored,
)  # fmt: skip


class EventLog:
    """Append-only log in `folder`, held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Open or create. Raises `TrainingError` if it is held elsewhere or damaged."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._lock = os.open(folder / "coordinator.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise TrainingError(
                f"{folder}: another coordinator is running on this folder; stop it first"
            ) from None
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            self._database = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._synchronous = True
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise self._damaged(f"format {version}, this dilocox reads {FORMAT}")
            self._database.execute(f"PRAGMA user_version={FORMAT}")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS events ("
                "number INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, "
                "data TEXT NOT NULL)"
            )
        except sqlite3.DatabaseError as error:
            self.close()
            raise self._damaged(str(error)) from None

    def append(self, event: e.Event) -> None:
        """Write one event before it takes effect. Raises `TrainingError`."""
        hard = not isinstance(event, _SOFT)
        data = json.dumps(event.to_json(), separators=(",", ":"))
        try:
            if hard != self._synchronous:
                self._database.execute(f"PRAGMA synchronous={'FULL' if hard else 'NORMAL'}")
                self._synchronous = hard
            self._database.execute(
                "INSERT INTO events (time, kind, data) VALUES (?, ?, ?)",
                (event.time, type(event).__name__, data),
            )
        except sqlite3.Error as error:
            raise TrainingError(
                f"{self.path}: cannot be written ({error}); free the disk, then start the "
                "coordinator again: the sites go on from where they are"
            ) from None

    def events(self) -> Iterator[e.Event]:
        """All events from the first. Raises `TrainingError` for what cannot be read."""
        try:
            for number, kind, data in self._database.execute(
                "SELECT number, kind, data FROM events ORDER BY number"
            ):
                try:
                    yield e.Event.decode(kind, json.loads(data))
                except (KeyError, TypeError, ValueError) as error:
                    raise self._damaged(f"event {number}: {error!r}") from None
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from None

    def close(self) -> None:
        """Let go of the file and the lock."""
        if hasattr(self, "_database"):
            self._database.close()
        os.close(self._lock)

    def _damaged(self, reason: str) -> TrainingError:
        return TrainingError(
            f"{self.path}: not a readable event log ({reason}); restore it from a copy"
        )
