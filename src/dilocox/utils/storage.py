"""Storage behind a folder or an fsspec URL, and patience with what lies over a network."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from dilocox.errors import DilocoxError
from dilocox.utils.backoff import backoff_delays

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
"""Seconds before the second try; they double from try to try."""

ROOM_SECONDS = 600.0
"""So long a full disk, or a lack of file descriptors, is waited for where a run cannot go on
without what is to be written."""
ROOM_PAUSE = 1.0
"""Seconds from one try to the next."""
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)

T = TypeVar("T")


def is_passing(error: BaseException) -> bool:
    """True for a full disk and for a lack of file descriptors: somebody can free both."""
    return isinstance(error, OSError) and error.errno in _PASSING


def when_there_is_room(
    action: Callable[[], T],
    what: str,
    *,
    seconds: float = ROOM_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `action` returns; tried again for `seconds` while the disk is full or file descriptors
    are missing, which is logged once for `what`. Raises `OSError` as `action` does."""
    deadline = None
    while True:
        try:
            return action()
        except OSError as error:
            if not is_passing(error):
                raise
            now = clock()
            if deadline is None:
                deadline = now + seconds
                log.error(
                    "%s: cannot be written (%s); tried again for %.0f s: free the disk",
                    what, error.strerror, seconds,
                )  # fmt: skip
            if now >= deadline:
                raise
        sleep(ROOM_PAUSE)


class Room:
    """Whether something waits for a full disk, or for file descriptors."""

    def __init__(self, seconds: float = ROOM_SECONDS, pause: float = ROOM_PAUSE) -> None:
        self._seconds, self._pause = seconds, pause
        self.awaited = False
        """Whether `wait_for` waits now. Whoever waits for its caller need not give up."""

    def wait_for(self, action: Callable[[], T], what: str) -> T:
        """As `when_there_is_room`."""

        def pause(_: float) -> None:
            self.awaited = True
            time.sleep(self._pause)

        try:
            return when_there_is_room(action, what, seconds=self._seconds, sleep=pause)
        finally:
            self.awaited = False


def sync_folder(folder: Path) -> None:
    """The names of what is in a folder survive a power cut. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def opened(where: str) -> tuple[Any, str]:
    """The file system and the path in it of a folder or URL.

    Raises `ValueError` for a protocol that fsspec does not know, `ImportError` if the package for
    it is not installed.
    """
    files, path = fsspec.core.url_to_fs(where)
    return files, path


def is_local(files: Any) -> bool:
    """True for folders of this machine: what fails there fails again."""
    return "file" in _protocols(files)


def unsafe_reason(path: Path, folder: Path) -> str:
    """Why `path` must not be opened as a file of `folder`, which may be a stranger's; or "".

    A pipe or a device may never end, and a link may lead to a private file of the reader. A path
    that is not there is safe: whoever opens it says that.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:  # a circle of links, or a name too long
        return f"cannot be opened ({error.strerror})"
    if path.is_dir() and path.is_symlink():
        return "a link to a folder"
    if not path.resolve().is_relative_to(folder.resolve()):
        return "a link that leads out of the folder"
    if stat.S_ISDIR(mode):
        return "a folder in the place of a file"
    return "" if stat.S_ISREG(mode) else "a pipe or a device in the place of a file"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file of this machine, hex. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """What `call` will return or raise, in a thread that keeps no process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="disk", daemon=True).start()
    return future


def retry(
    action: Callable[[], T],
    where: str,
    seconds: float,
    *,
    failures: tuple[type[BaseException], ...] = (Exception,),
    reason: Callable[[BaseException], str] = str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `action` on the storage `where` returns, tried again for `seconds` after it has first
    ended with `failures`; on this machine's own disks it is tried once.

    Every pause is logged with the `reason`. Raises the last error; a `DilocoxError`, which says
    what is wrong for good, at once.
    """
    deadline = None
    for pause in backoff_delays(FIRST_PAUSE, math.inf, lambda _, most: most):
        try:
            return action()
        except DilocoxError:
            raise
        except failures as error:
            now = clock()
            deadline = now + seconds if deadline is None else deadline
            if now + pause > deadline or is_local(opened(where)[0]):
                raise
            log.warning("%s: %s; tried again in %.1f s", where, reason(error), pause)
        sleep(pause)
    raise AssertionError("pauses never end")


def _protocols(files: Any) -> tuple[str, ...]:
    found = files.protocol
    return (found,) if isinstance(found, str) else tuple(found)
