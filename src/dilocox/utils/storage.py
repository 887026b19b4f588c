"""Storage in a folder or behind an fsspec URL: retries, full disks, and safe opening of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import secrets
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
from dilocox.utils.http_proxy import proxy_of

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
"""Seconds before the first retry; the delay doubles with each retry."""

ROOM_SECONDS = 600.0
"""Seconds to wait while a disk is full, or while file descriptors are lacking, if the run cannot go
on without the write."""
ROOM_PAUSE = 1.0
"""Seconds between two tries while a disk is full."""
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)

T = TypeVar("T")


def nearest_existing(path: Path) -> Path:
    """Returns `path` if it exists, else its nearest parent that exists, on the same disk.

    What lies below a folder that may not be entered does not exist for this user.
    """
    while not os.path.exists(path) and path != path.parent:  # Path.exists raises for such a folder
        path = path.parent
    return path


def is_passing(error: BaseException) -> bool:
    """Returns whether an error may pass: a full disk, or a lack of file descriptors."""
    return isinstance(error, OSError) and error.errno in _PASSING


def when_there_is_room(
    action: Callable[[], T],
    what: str,
    *,
    seconds: float = ROOM_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `action` and return its result; retry while the disk is full.

    A lack of file descriptors is treated like a full disk. The first such failure is logged.

    Args:
        action: the call; it may run several times.
        what: name of the file or action, for the log.
        seconds: how long to retry after the first failure.
        clock: returns monotonic seconds.
        sleep: waits for a number of seconds.

    Raises:
        OSError: the error of `action`, if it is another one or if `seconds` have passed.
    """
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
                    "%s: cannot be written (%s); trying again for up to %.0f s: free disk space",
                    what, error.strerror, seconds,
                )  # fmt: skip
            if now >= deadline:
                raise
        sleep(ROOM_PAUSE)


class Room:
    """Like `when_there_is_room`, but other threads can see whether it is waiting."""

    def __init__(self, seconds: float = ROOM_SECONDS, pause: float = ROOM_PAUSE) -> None:
        self._seconds, self._pause = seconds, pause
        self.awaited = False
        """Whether `wait_for` is waiting now. While it is, a thread that waits for the thread which
        called `wait_for` should not time out."""

    def wait_for(self, action: Callable[[], T], what: str) -> T:
        """Call `action` and return its result. See `when_there_is_room`."""

        def pause(_: float) -> None:
            self.awaited = True
            time.sleep(self._pause)

        try:
            return when_there_is_room(action, what, seconds=self._seconds, sleep=pause)
        finally:
            self.awaited = False


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that others see whole or not at all, and flush it to disk.

    `mode`: rights of the file, less those that the process's mask takes. The folder's entry is not
    flushed (`sync_folder`). Raises `OSError` if the file cannot be written; then no partial file is
    left.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        # On a full disk the partial file would take the space that the next attempt needs. A signal
        # may end the process here, too.
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def overwrite(path: Path, text: str) -> None:
    """Write a text file that a user named. If that fails, an earlier file stays as it was.

    A symbolic link stays, and its target is replaced; a device or a pipe is written to in place.
    Raises `OSError`.
    """
    target = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a loop of links
    if target.is_file():
        replace_file(target, text.encode(), stat.S_IMODE(target.stat().st_mode))
    elif target.exists():
        target.write_text(text, encoding="utf-8")
    else:
        replace_file(target, text.encode())


def keep_file(path: Path, data: bytes) -> None:
    """Write a file and its folder's entry as `replace_file` does, unless it has this content.

    A power cut leaves the earlier file or the new one. Raises `OSError` like `replace_file`.
    """
    if not path.exists() or path.read_bytes() != data:
        replace_file(path, data)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that new names survive a power failure.

    Raises `OSError` if the folder cannot be opened or flushed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def opened(where: str, **options: Any) -> tuple[Any, str]:
    """Returns the fsspec file system of a folder or URL, and the path in this file system.

    A place without `://` is a path on this machine, whatever its name holds; the returned path is
    absolute. fsspec itself would take `runs/a::1` for two places, and drop the second one.

    Args:
        where: folder, or URL of one place.
        **options: options of the file system.

    Raises:
        ValueError: fsspec does not know the protocol, or the URL has `::` in it.
        ImportError: the package for the protocol is not installed.
    """
    if "://" not in where:
        path = str(Path(os.path.expanduser(where)).absolute())
        return fsspec.filesystem("file", **options), path
    if "::" in where:
        raise ValueError(
            "fsspec takes :: for the border between two places: use a URL without it, and write "
            "an IPv6 address in full"
        )
    if where.lower().startswith(("http://", "https://")) and proxy_of(where):
        # Packages for other protocols look for a proxy themselves.
        options = {"client_kwargs": {"trust_env": True}, **options}
    files, path = fsspec.core.url_to_fs(where, **options)
    return files, path


def is_local(files: Any) -> bool:
    """Returns whether an fsspec file system is this machine's own, where retries do not help."""
    return "file" in _protocols(files)


def unsafe_reason(path: Path, folder: Path) -> str:
    """Returns why `path` must not be opened as a file of the untrusted `folder`, or "" if it may.

    Reading a pipe or a device may never end, and a link may lead to a private file of the user. A
    path that does not exist is safe; opening it raises the usual error.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:  # a loop of links, or a name that is too long
        return f"cannot be opened ({error.strerror})"
    if path.is_dir() and path.is_symlink():
        return "a link to a folder"
    if not path.resolve().is_relative_to(folder.resolve()):
        return "a link that leads out of the folder"
    if stat.S_ISDIR(mode):
        return "a folder in the place of a file"
    return "" if stat.S_ISREG(mode) else "a pipe or a device in the place of a file"


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 (hex) of a local file. Raises `OSError` if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread. Returns a future for its result or error."""
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
    """Call `action` on a storage and return its result; retry it on failure.

    Local storage is not retried, since a failure there repeats. Every retry is logged.

    Args:
        action: the call; it may run several times.
        where: folder or URL of the storage.
        seconds: how long to retry after the first failure.
        failures: classes of errors after which `action` is retried.
        reason: returns the text of an error for the log.
        clock: returns monotonic seconds.
        sleep: waits for a number of seconds.

    Raises:
        DilocoxError: at once, since it stands for a permanent fault.
        BaseException: the last error of `action`, if it is not retried or `seconds` have passed.
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
            log.warning("%s: %s; trying again in %.1f s", where, reason(error), pause)
        sleep(pause)
    raise AssertionError("pauses never end")


def _protocols(files: Any) -> tuple[str, ...]:
    found = files.protocol
    return (found,) if isinstance(found, str) else tuple(found)
