"""A file that grows by whole lines, on a disk that may be full for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class AppendFile:
    """Appends to a file: a piece of data is there whole, or not at all.

    After an `OSError` the file holds nothing of the data of that call, and a later call may
    succeed. `append` belongs to one thread; `sync` may be called from any.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """Open or create. `durable`: `sync` will be called. Raises `OSError`."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.length = self._synced = os.fstat(self._descriptor).st_size
        self._unsynced = bytearray() if durable else None
        self._torn = self._doubtful = False
        self._lock, self._syncing = threading.Lock(), threading.Lock()

    def append(self, data: bytes) -> None:
        """Add `data`. Raises `OSError`; then nothing was added."""
        with self._lock:
            if self._torn:
                os.ftruncate(self._descriptor, self.length)
                self._torn = False
            try:
                _write(self._descriptor, data, self.length)
            except OSError:
                self._torn = True
                # What is cut away now need not be found torn by a reader, or after a crash.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self.length)
                    self._torn = False
                raise
            self.length += len(data)
            if self._unsynced is not None:
                self._unsynced += data

    def sync(self) -> None:
        """Return when all that was appended will survive a power cut. Raises `OSError`."""
        if self._unsynced is None:
            raise ValueError("a file that was not opened as durable")
        with self._syncing:
            with self._lock:
                goal = self.length
                if goal == self._synced and not self._doubtful:
                    return
                if self._doubtful:
                    # After a failed fsync the kernel takes the pages for written: write them anew.
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
        """Let go of the file. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
