"""A log writer that survives a full disk: no entry is lost, and the run waits for room.

A statement of a site is in the log before the site gets its answer; otherwise the site asks again.
A decision of the coordinator that cannot be written is queued. Queued entries are written before
any other entry, and before any site hears of the decision.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from dilocox.errors import TrainingError
from dilocox.record.log.transparency_log import LogWriter
from dilocox.record.writer.checkpoint_publisher import CheckpointPublisher
from dilocox.utils.storage import when_there_is_room

log = logging.getLogger(__name__)


class PatientLog:
    """Writes a log and a queue of entries that the disk has not taken yet.

    Only one thread may call it; checkpoints are signed in a background thread.
    """

    def __init__(self, writer: LogWriter, say: Callable[[str], None]) -> None:
        """`say` gets one line when a write fails, and one when writes succeed again."""
        self.writer, self._say = writer, say
        self.anchor: CheckpointPublisher | None = None
        """Publishes checkpoints; None if the run file has no `record.anchor`."""
        self.hold: Callable[[str], None] | None = None
        """Called in place of `anchor.take`, if checkpoints must wait before they are published."""
        self._owed: deque[str] = deque()
        """Entries that could not be written yet."""
        self._heard = True
        """False while a decision that sites may not hear of yet is not synced."""
        self._failing = False
        self._beside = ThreadPoolExecutor(1, "checkpoint-of-the-log")
        self._uncovered = ""
        """Reason why the newest checkpoint could not be written; empty if it was written."""
        self._covering_failed = False

    def append(self, entry: str) -> None:
        """Append a site's statement. Raises `TrainingError` if nothing could be appended."""

        def write() -> None:
            self._pay()
            self.writer.append(entry)

        self._attempt(write)

    def owe(self, entry: str, *, synced: bool = False) -> None:
        """Append a decision now, or queue it until the disk takes it. `settle` waits for that.

        `synced`: sites may hear of the decision only once it survives a power cut.
        """
        self._owed.append(entry)
        self._heard = self._heard and not synced
        try:
            self.settle() if synced else self._attempt(self._pay)
        except TrainingError as error:
            log.debug("%s", error)  # `say` has been told; `settle` raises the error

    def settle(self) -> None:
        """Block until all decisions are in the log, and synced ones survive a power cut.

        Raises `TrainingError` if the disk fails.
        """
        if not self._heard:
            self.sync()
        elif self._owed:
            self._attempt(self._pay)

    def sync(self) -> None:
        """Block until all entries survive a power cut. Raises `TrainingError` if the disk fails."""

        def write() -> None:
            self._pay()
            self.writer.sync()

        self._attempt(write)
        self._heard = True

    def lines(self) -> Iterator[str]:
        """Iterate over all entries, those on the disk and then queued ones. Raises `OSError`."""
        yield from self.writer.lines()
        yield from list(self._owed)

    @property
    def settled(self) -> bool:
        """True if no entry is queued."""
        return not self._owed

    def cover(self, then: Callable[[], None] | None = None) -> None:
        """Sign a checkpoint in the background thread, because a sync to disk takes time.

        `then`: called in that thread after the checkpoint is written.
        """
        self._beside.submit(self._cover, then)
        self._tell()

    def tend(self) -> None:
        """Retry failed writes and report changes. Call this every few seconds."""
        if self._owed or not self._heard or self._failing:
            try:
                self.sync()
            except TrainingError as error:
                log.debug("%s", error)
        if self._uncovered:
            self._beside.submit(self._cover)
        self._tell()

    def close(self) -> None:
        """Sign and publish a last checkpoint, and close the log. Waits while the disk is full."""
        self._beside.shutdown()

        def finish() -> None:
            self._pay()
            note = self.writer.cover()
            if self.anchor is not None:
                self.anchor.take(note)

        try:
            when_there_is_room(finish, "record")
        except OSError as error:
            self._say(
                f"record: its end was not written ({error.strerror}), so nobody can verify it; "
                "start the coordinator once more on this folder"
            )
        finally:
            self.writer.release()
        if self.anchor is not None:
            self.anchor.close()
        self._tell()

    def abandon(self) -> None:
        """Close the log, and sign and publish nothing more: another process goes on with it."""
        self._beside.shutdown(cancel_futures=True)
        self.writer.release()
        if self.anchor is not None:
            self.anchor.close()

    def _pay(self) -> None:
        while self._owed:
            self.writer.append(self._owed[0])
            self._owed.popleft()

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._say(
                    f"record: cannot be written ({error.strerror}); the run waits until it can be: "
                    "free the disk"
                )
            raise TrainingError(
                f"record: cannot be written ({error.strerror}); free the disk, the run goes on then"
            ) from None
        if self._failing:
            self._failing = False
            self._say("record: is written again, nothing is missing; the run goes on")

    def _cover(self, then: Callable[[], None] | None = None) -> None:
        """Sign a checkpoint, in the background thread. `_tell` reports an error, `tend` retries."""
        try:
            note = self.writer.cover()
            if self.anchor is not None:
                (self.hold or self.anchor.take)(note)
            if then is not None:
                then()
            self._uncovered = ""
        except Exception as error:  # any error is reported and retried
            self._uncovered = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

    def _tell(self) -> None:
        reason = self._uncovered
        if bool(reason) != self._covering_failed:
            self._covering_failed = bool(reason)
            self._say(
                f"record: its signed checkpoint cannot be written ({reason}); training goes on, "
                "and the checkpoint is tried again"
                if reason
                else "record: its signed checkpoint is written again"
            )
        trouble = None if self.anchor is None else self.anchor.trouble()
        if trouble is not None:
            self._say(f"{trouble}; training goes on")
