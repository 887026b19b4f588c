"""A file that only grows, by atomic appends, on a disk that may be full for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class AppendFile:
    """Appends data to a file; each append is written completely or not at all.

    If `append` raises `OSError`, the file contains nothing of its data, and a later call may
    succeed. Only one thread may call `append`; any thread may call `sync`.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """Open or create the file at `path`. Raises `OSError`.

        `durable` must be true if `sync` will be called; data is then kept in memory until `sync`.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.length = self._synced = os.fstat(self._descriptor).st_size
        self._unsynced = bytearray() if durable else None
        self._torn = self._doubtful = False
        self._lock, self._syncing = threading.Lock(), threading.Lock()

    def append(self, data: bytes) -> None:
        """Append `data`. Raises `OSError` if the write fails; nothing is appended then."""
        with self._lock:
            if self._torn:
                os.ftruncate(self._descriptor, self.length)
                self._torn = False
            try:
                _write(self._descriptor, data, self.length)
            except OSError:
                self._torn = True
                # Remove the partial write at once, so that neither a reader nor a restart after a
                # crash finds it. If this fails, the next append removes it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self.length)
                    self._torn = False
                raise
            self.length += len(data)
            if self._unsynced is not None:
                self._unsynced += data

    def sync(self) -> None:
        """Return when all data appended so far would survive a power failure.

        Raises `OSError` if the disk fails, and `ValueError` if the file was not opened as durable.
        """
        if self._unsynced is None:
            raise ValueError("sync() needs a file that was opened as durable")
        with self._syncing:
            with self._lock:
                goal = self.length
                if goal == self._synced and not self._doubtful:
                    return
                if self._doubtful:
                    # After a failed fsync the kernel marks the pages as written: write them again.
                    _write(self._descriptor, bytes(self._unsynced), self._synced)
            try:
                os.fsync(self._descriptor)
            except OSError:
                self._doubtful = True
                raise
            with self._lock:
                self._doubtful = False
                del self._unsynced[: goal - self._synced]
                self._synced = goal

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
