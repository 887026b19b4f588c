"""The coordinator's end of a standby: what a standby copies, and what waits for it.

A standby asks again and again for what it lacks, and each request says what is on its disk. While
it is in step, no caller gets a reply before the standby has all events and all statements of the
record up to that reply on its disk. A standby that does not answer in time is given up, with one
line, and the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from dilocox.coordinator.protocol.standby_messages import Copied, FollowReply
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.refusals import Refused

MOST_EVENTS = 2000
MOST_BYTES = 1 << 22
"""Most events, and bytes of each file, in one reply."""
CLOSE, CLOSE_BYTES = 100, 1 << 18
"""Events, and bytes of the record, that a standby may lack when callers begin to wait for it."""
SHARE = 0.25
"""Patience with a standby, in units of the heartbeat time-out: a reply that is held back longer
would make its caller count as dead."""
ANOTHER = 10.0
"""Seconds of silence after which another standby may follow."""
RECORD, METRICS, RUN_FILE = "record/statements.jsonl", "metrics.jsonl", "run.toml"
"""Files below the run's folder."""


class Publisher(Protocol):
    """Who publishes checkpoints of the record, as `CheckpointPublisher` does."""

    def take(self, checkpoint: str) -> None:
        """Publish a signed checkpoint."""


class _Extent(NamedTuple):
    """How far a copy goes, or what is copied."""

    events: int
    """Number of the last event."""
    record: int
    """Bytes of the record's statements."""

    def covers(self, other: _Extent) -> bool:
        """Return whether nothing of `other` is lacking here."""
        return self.events >= other.events and self.record >= other.record


class StandbyLink:
    """Copies the files of a run to at most one standby."""

    def __init__(self, folder: Path, patience: float, tell: Callable[[str], None]) -> None:
        """Wait for a standby.

        Args:
            folder: The run's folder.
            patience: Seconds for which a reply may wait for the standby.
            tell: Called with one line when a standby is in step, and when it is given up.
        """
        self._folder, self._patience, self._tell = folder, patience, tell
        self.in_step = False
        """Whether callers wait for the standby."""
        self._goal: _Extent | None = None
        """With this the standby has caught up; None once that was told."""
        self._name, self._heard = "", -ANOTHER
        self._copied = _Extent(0, 0)
        """What is on the standby's disk."""
        self.statements = 0
        """Statements of the record on the standby's disk."""
        self._came = asyncio.Event()
        self.on_copied: Callable[[], None] = lambda: None
        """Called when the standby has more, or is not waited for any more."""
        self.on_awaited: Callable[[], None] = lambda: None
        """Called when a caller begins to wait: a request of the standby is answered now."""

    def took(self, name: str, copied: Copied, log: EventLog) -> None:
        """Note what is on the disk of the standby `name`.

        Raises `Refused` if it is not the beginning of this run's files, or if another standby has
        asked lately.
        """
        now = time.monotonic()
        if name != self._name and now < self._heard + ANOTHER:
            raise Refused("conflict", "another standby follows this run; end one of them")
        self._check(copied, log)
        self._name, self._heard = name, now
        self._copied, self.statements = _Extent(copied.events, copied.record), copied.statements
        there = self._there(log)
        near = _Extent(copied.events + CLOSE, copied.record + CLOSE_BYTES)
        if not self.in_step and near.covers(there):
            self.in_step, self._goal = True, there
        if self._goal is not None and self._copied.covers(self._goal):
            self._goal = None
            self._tell(
                "a standby is in step: it has all events and statements on its disk before a site "
                "is told"
            )
        self._came.set()
        self.on_copied()

    async def settled(self, log: EventLog) -> None:
        """Wait until a standby that is in step has all present events and statements on its disk.

        The standby is given up if it does not have them in time.
        """
        if not self.in_step:
            return
        target = self._there(log)
        if self._copied.covers(target):
            return
        # A statement may come without an event, so the standby's request may not know of it yet.
        self.on_awaited()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while self.in_step and not self._copied.covers(target):
                    self._came.clear()
                    await self._came.wait()
        if self.in_step and not self._copied.covers(target):
            self._give_up(target)

    def let_go(self) -> None:
        """Wait no longer for the standby. Call this when it has all of a run that has ended."""
        self.in_step, self._goal = False, None
        self._came.set()
        self.on_copied()

    def _give_up(self, target: _Extent) -> None:
        lacks = self._copied.events < target.events
        what = f"event {target.events}" if lacks else "the record's last statements"
        self.let_go()
        self._tell(
            f"the standby did not take {what} within {self._patience:g} s: the run goes on "
            "without it, and it must not take over until it is in step again"
        )

    def _there(self, log: EventLog) -> _Extent:
        """Return what there is to copy."""
        path = self._folder / RECORD
        return _Extent(log.last, path.stat().st_size if path.exists() else 0)

    def is_whole(self, copied: Copied, reply: FollowReply, log: EventLog) -> bool:
        """Return whether a standby lacks nothing of events and record once it has `reply`."""
        events = reply.events[-1][0] if reply.events else copied.events
        return self._there(log) == (events, copied.record + len(reply.record.encode()))

    def reply(self, copied: Copied, log: EventLog, generation: int, *, over: bool) -> FollowReply:
        """Return what the standby lacks. Raises `OSError` if a file cannot be read."""
        return FollowReply(
            generation=generation,
            last=log.last,
            events=log.rows(copied.events, MOST_EVENTS),
            record=self._lines(RECORD, copied.record),
            metrics=self._lines(METRICS, copied.metrics),
            run_file=self._text(RUN_FILE),
            over=over,
        )

    def _check(self, copied: Copied, log: EventLog) -> None:
        same = copied.events <= log.last and log.row_digest(copied.events) == copied.event_digest
        if not same or self._last_line(copied.record) != copied.record_digest:
            raise Refused(
                "conflict",
                "the standby's copy is not the beginning of this run's log; begin the standby "
                "again in a new folder",
            )

    def _last_line(self, offset: int) -> str:
        """Return the SHA-256 of the statement that ends at `offset`; empty at the begin."""
        if offset == 0:
            return ""
        try:
            with (self._folder / RECORD).open("rb") as file:
                for size in (1 << 13, 1 << 17, MOST_BYTES):
                    start = max(0, offset - size)
                    file.seek(start)
                    data = file.read(offset - start)
                    if len(data) < offset - start:
                        break
                    lines = data.split(b"\n")
                    # The first piece of several is whole only at the begin of the file.
                    if lines[-1] == b"" and len(lines) > (1 if start == 0 else 2):
                        return hashlib.sha256(lines[-2]).hexdigest()
        except OSError:
            pass  # as if it ended elsewhere: the standby is refused
        return "none"

    def _lines(self, name: str, offset: int) -> str:
        path = self._folder / name
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(MOST_BYTES)
        return data[: data.rfind(b"\n") + 1].decode()

    def _text(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""


class HeldBack:
    """Publishes checkpoints of the record only when a standby that is in step has their statements.

    Else a standby that takes over could sign another log than the published one.
    """

    def __init__(
        self, publisher: Publisher, link: StandbyLink, size_of: Callable[[str], int]
    ) -> None:
        """`size_of`: returns the number of statements of a signed checkpoint."""
        self._publisher, self._link, self._size_of = publisher, link, size_of
        self._held, self._lock = "", threading.Lock()
        link.on_copied = self.release

    def take(self, checkpoint: str) -> None:
        """Publish a checkpoint, or hold it back. A newer one replaces a held one."""
        with self._lock:
            self._held = checkpoint
        self.release()

    def release(self) -> None:
        """Publish the held checkpoint if the standby has its statements or is not in step."""
        with self._lock:
            held, link = self._held, self._link
            if not held or (link.in_step and link.statements < self._size_of(held)):
                return
            self._held = ""
            self._publisher.take(held)
