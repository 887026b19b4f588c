"""The event log: one SQLite file. An event is written to it before the event takes effect."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from dilocox.coordinator.server import events as e
from dilocox.errors import TrainingError

log = logging.getLogger(__name__)

FORMAT = 1
NAME = "coordinator.sqlite"
LOCK = "coordinator.lock"
# All events survive a crash of the process. A crash of the machine may lose the latest events of
# these kinds. They are frequent, and their loss costs little: a rank sends its vote, or that a link
# broke, until it hears of a decision; fetches follow from votes; and the later reports of a rank
# stand for lost ones. All other events are flushed to disk (fsync) at once, because a rank acts on
# the reply and does not ask again.
# An event of these kinds may reach the disk early, too, so the record is synced before a decision.
_SOFT = (e.Voted, e.Fetching, e.Broke, e.RoundDone, e.CheckpointWritten, e.Reported)


class EventLog:
    """Append-only log of events, locked by one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Open or create the log in `folder`.

        Raises `TrainingError` if another process has locked the log, or if it is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
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
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS snapshots ("
                "number INTEGER PRIMARY KEY, code TEXT NOT NULL, digest TEXT NOT NULL, "
                "data BLOB NOT NULL)"
            )
            (last,) = self._database.execute("SELECT max(number) FROM events").fetchone()
            self.last: int = last or 0
            """Number of the last event, from 1."""
            soft = ", ".join(f"'{kind.stored_as}'" for kind in _SOFT)
            (hard,) = self._database.execute(
                f"SELECT max(number) FROM events WHERE kind NOT IN ({soft})"  # noqa: S608
            ).fetchone()
            self.flushed: int = hard or 0
            """Number of the last event that was flushed to disk; so are all before it."""
        except sqlite3.DatabaseError as error:
            self.close()
            raise self._damaged(str(error)) from None

    def append(self, event: e.Event) -> None:
        """Write one event. Raises `TrainingError` if the file cannot be written."""
        hard = not isinstance(event, _SOFT)
        data = json.dumps(event.to_json(), separators=(",", ":"))
        try:
            if hard != self._synchronous:
                self._database.execute(f"PRAGMA synchronous={'FULL' if hard else 'NORMAL'}")
                self._synchronous = hard
            self._database.execute(
                "INSERT INTO events (number, time, kind, data) VALUES (?, ?, ?, ?)",
                (self.last + 1, event.time, event.stored_as, data),
            )
            self.last += 1
            self.flushed = self.last if hard else self.flushed
        except sqlite3.Error as error:
            raise TrainingError(
                f"{self.path}: cannot be written ({error}); free the disk, then start the "
                "coordinator again: the sites go on from where they are"
            ) from None

    def events(self, after: int = 0, until: int | None = None) -> Iterator[e.Event]:
        """Yield the events with numbers above `after`, up to `until` (None: up to the last event).

        Raises `TrainingError` if an event cannot be read.
        """
        try:
            for number, kind, data in self._database.execute(
                "SELECT number, kind, data FROM events WHERE number > ? AND number <= ? "
                "ORDER BY number",
                (after, self.last if until is None else until),
            ):
                try:
                    yield e.Event.decode(kind, json.loads(data))
                except (KeyError, TypeError, ValueError) as error:
                    raise self._damaged(f"event {number}: {error!r}") from None
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from None

    def rows(self, after: int, most: int) -> list[tuple[int, float, str, str]]:
        """Return at most `most` events after number `after`, as (number, time, kind, JSON).

        Raises `TrainingError` if they cannot be read.
        """
        try:
            found = self._database.execute(
                "SELECT number, time, kind, data FROM events WHERE number > ? ORDER BY number "
                "LIMIT ?",
                (after, most),
            )
            return [(int(n), float(time), str(kind), str(data)) for n, time, kind, data in found]
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from None

    def row_digest(self, number: int) -> str:
        """Return the SHA-256, hex, of an event as it is stored; empty if there is none."""
        found = self.rows(number - 1, 1) if number > 0 else []
        return "" if not found or found[0][0] != number else _digest_of(*found[0])

    def copy(self, rows: Sequence[tuple[int, float, str, str]]) -> None:
        """Append events of another log, and return when they would survive a power cut.

        Raises `TrainingError` if they do not follow the last event, or cannot be written.
        """
        if [number for number, *_ in rows] != list(range(self.last + 1, self.last + 1 + len(rows))):
            raise self._damaged(f"the events to copy do not follow event {self.last}")
        try:
            if not self._synchronous:
                self._database.execute("PRAGMA synchronous=FULL")
                self._synchronous = True
            with self._transaction():
                self._database.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise TrainingError(
                f"{self.path}: cannot be written ({error}); free the disk"
            ) from None
        self.last = self.flushed = self.last + len(rows)

    def last_kept(self, tick: int) -> int:
        """Return the number of the last event that committed the checkpoint at `tick`.

        Raises `TrainingError` if there is no such event, or the log cannot be read.
        """
        try:
            for number, data in self._database.execute(
                "SELECT number, data FROM events WHERE kind = 'Kept' ORDER BY number DESC"
            ):
                if json.loads(data)["tick"] == tick:
                    return int(number)
        except (sqlite3.DatabaseError, KeyError, ValueError) as error:
            raise self._damaged(str(error)) from None
        raise self._damaged(f"no checkpoint at slot {tick} was completed")

    def add_snapshot(self, code: str, data: bytes, most: int) -> None:
        """Store a snapshot of the state after the last event, and delete all but the newest `most`.

        `code` names the version of the code that made the snapshot. The write is atomic. Raises
        `TrainingError` if the file cannot be written.
        """
        digest = hashlib.sha256(data).hexdigest()
        try:
            with self._transaction():
                self._database.execute(
                    "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)",
                    (self.last, code, digest, data),
                )
                self._database.execute(
                    "DELETE FROM snapshots WHERE number NOT IN "
                    "(SELECT number FROM snapshots ORDER BY number DESC LIMIT ?)",
                    (most,),
                )
        except sqlite3.Error as error:
            raise TrainingError(
                f"{self.path}: no snapshot was written ({error}); the next start takes longer"
            ) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def snapshots(self, code: str, until: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the snapshots made by `code`, newest first, as (number of the last event, state).

        Snapshots of events after `until` (None: the last event) and damaged snapshots are left out.
        """
        last = self.last if until is None else until
        try:
            found = self._database.execute(
                "SELECT number, digest, data FROM snapshots WHERE code = ? AND number <= ? "
                "ORDER BY number DESC",
                (code, last),
            )
            for number, digest, data in found.fetchall():
                if hashlib.sha256(data).hexdigest() == digest:
                    yield int(number), data
        except (sqlite3.DatabaseError, TypeError) as error:
            # Snapshots only save time: the events suffice, and reading them shows any damage.
            log.warning("%s: snapshots cannot be read (%s)", self.path, error)

    def close(self) -> None:
        """Close the file and release the lock."""
        if hasattr(self, "_database"):
            self._database.close()
        os.close(self._lock)

    def _damaged(self, reason: str) -> TrainingError:
        return TrainingError(
            f"{self.path}: not a readable event log ({reason}); restore it from a copy"
        )


def _digest_of(number: int, time: float, kind: str, data: str) -> str:
    return hashlib.sha256(f"{number} {time!r} {kind} {data}".encode()).hexdigest()
