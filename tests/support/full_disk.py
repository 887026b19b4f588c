"""A disk that is full for a while: writes of files that run for long fail, here without a disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


class FullDisk:
    """Lets `os.pwrite` and the making of files below a folder fail as on a full disk.

    Files are made by `Path.open` or by `os.open` with `O_CREAT`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._left: int | None = None
        self._failures = 0
        self._folder, self._error = str(folder), errno.ENOSPC
        pwrite, opened, made = os.pwrite, Path.open, os.open

        def limited(descriptor: int, data: bytes, offset: int) -> int:
            if self._left is None:
                return pwrite(descriptor, data, offset)
            if self._left == 0:
                raise self._failure()
            written = pwrite(descriptor, memoryview(data)[: self._left], offset)
            self._left -= written
            return written

        def not_opened(path: Path, mode: str = "r", *args: object, **options: object) -> object:
            if self._left is not None and "w" in mode and str(path).startswith(self._folder):
                raise self._failure()
            return opened(path, mode, *args, **options)  # type: ignore[call-overload]

        def not_made(path: str | Path, flags: int, *args: int, **options: int | None) -> int:
            below = str(path).startswith(self._folder)
            if self._left is not None and flags & os.O_CREAT and below:
                raise self._failure()
            return made(path, flags, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "pwrite", limited)
        monkeypatch.setattr(os, "open", not_made)
        monkeypatch.setattr(Path, "open", not_opened)

    def _failure(self) -> OSError:
        self._failures -= 1
        if self._failures == 0:
            self.free()
        return OSError(self._error, os.strerror(self._error))

    def leave(self, size: int, error: int = errno.ENOSPC, failures: int = 0) -> None:
        """There is room for so many bytes; then writes end with `error`, after so many `failures`
        (0: whenever told to) there is room again."""
        self._left, self._error, self._failures = size, error, failures

    def free(self) -> None:
        """There is room again."""
        self._left = None
