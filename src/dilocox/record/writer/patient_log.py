"""The log of a run on a disk that may be full for a while: nothing is lost, and the run waits.

What a site has signed is in the log before the site is answered, or the site asks again. What the
coordinator has decided is owed to the log from then on: it is added before anything else is, and
before anybody hears of it.
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
    """Writes a log, and goes on where the disk had kept it from that.

    All calls are of one thread; checkpoints are signed in another one.
    """

    def __init__(self, writer: LogWriter, say: Callable[[str], None]) -> None:
        """`say` is told in one line when the disk fails, and when it is written again."""
        self.writer, self._say = writer, say
        self.anchor: CheckpointPublisher | None = None
        """Takes checkpoints elsewhere."""
        self._owed: deque[str] = deque()
        self._heard = True
        """What had to be synced before sites hear of it is."""
        self._failing = False
        self._beside = ThreadPoolExecutor(1, "checkpoint-of-the-log")
        self._uncovered = ""
        """Why the newest checkpoint could not be written; none: it was."""
        self._covering_failed = False

    def append(self, entry: str) -> None:
        """Add what a site has signed. Raises `TrainingError`; then nothing was added."""

        def write() -> None:
            self._pay()
            self.writer.append(entry)

        self._attempt(write)

    def owe(self, entry: str, *, synced: bool = False) -> None:
        """Add what was decided, now or as soon as that can be; `settle` says whether it was.

        `synced`: nobody may hear of it before it survives a power cut.
        """
        self._owed.append(entry)
        self._heard = self._heard and not synced
        try:
            self.settle() if synced else self._attempt(self._pay)
        except TrainingError as error:
            log.debug("%s", error)  # said already; `settle` raises it

    def settle(self) -> None:
        """Return when all that was decided is in the log and survives a power cut.

        Raises `TrainingError`.
        """
        if not self._heard:
            self.sync()
        elif self._owed:
            self._attempt(self._pay)

    def sync(self) -> None:
        """Return when all that was said survives a power cut. Raises `TrainingError`."""

        def write() -> None:
            self._pay()
            self.writer.sync()

        self._attempt(write)
        self._heard = True

    def lines(self) -> Iterator[str]:
        """All that was said, the end of which may be owed to the log. Raises `OSError`."""
        yield from self.writer.lines()
        yield from list(self._owed)

    @property
    def settled(self) -> bool:
        """All that was said is in the log."""
        return not self._owed

    def cover(self, then: Callable[[], None] | None = None) -> None:
        """Sign what is there, beside everything else: disks take their time to keep something.

        `then`: what is to be written once that is done.
        """
        self._beside.submit(self._cover, then)
        self._tell()

    def tend(self) -> None:
        """Try again what has failed. To be called every few seconds."""
        if self._owed or not self._heard or self._failing:
            try:
                self.sync()
            except TrainingError as error:
                log.debug("%s", error)
        if self._uncovered:
            self._beside.submit(self._cover)
        self._tell()

    def close(self) -> None:
        """Cover what is there, anchor that, and let go of the log. A full disk is waited for."""
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
        """In the other thread. What goes wrong is told by `_tell`, and tried again by `tend`."""
        try:
            note = self.writer.cover()
            if self.anchor is not None:
                self.anchor.take(note)
            if then is not None:
                then()
            self._uncovered = ""
        except Exception as error:  # also what nobody has thought of: it is told, and tried again
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
