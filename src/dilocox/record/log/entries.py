"""Entries of a log as a sequence that reads the file on each pass.

The log of a long run is larger than memory, so the entries are not kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from dilocox.errors import RecordError
from dilocox.utils.storage import unsafe_reason


class FileEntries(Sequence[str]):
    """A range of the lines of a file, which must not change while it is read."""

    def __init__(self, path: Path, first: int = 0, end: int | None = None) -> None:
        """Take lines `first` to `end`, exclusive; None: up to the last line.

        Raises `RecordError` if `end` is None and the file is not a plain file, cannot be read, or
        ends within a line.
        """
        self._path, self._first = path, first
        if end is None:
            _check(path)
            end = sum(1 for _ in _lines(path))
        self._end = max(first, end)

    @classmethod
    def covered(cls, path: Path, most: int) -> FileEntries:
        """Take at most the first `most` lines of a file that is being written.

        An incomplete last line does not count. Raises `RecordError` if the file cannot be read.
        """
        _check(path)
        found = sum(1 for _ in itertools.islice(_lines(path, whole=False), most))
        return cls(path, 0, found)

    def __len__(self) -> int:
        return self._end - self._first

    def __iter__(self) -> Iterator[str]:
        """Iterate over the lines in one pass over the file.

        Raises `RecordError` if the file cannot be read or has become shorter.
        """
        if not len(self):
            return
        for number, line in enumerate(_lines(self._path)):
            if number >= self._first:
                yield line
            if number + 1 == self._end:
                return
        raise RecordError(f"{self._path}: was cut while it was read")

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> FileEntries: ...

    def __getitem__(self, index: int | slice) -> str | FileEntries:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("entries are read forwards, one by one")
            return FileEntries(self._path, self._first + start, self._first + max(start, stop))
        place = range(len(self))[index]
        return next(iter(self[place : place + 1]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def lines_of(path: Path) -> Iterator[str]:
    """Iterate over the lines of a record's file, each with its newline.

    Raises `RecordError` if the path is not a plain file or cannot be read.
    """
    _check(path)
    yield from _read(path)


def _check(path: Path) -> None:
    reason = unsafe_reason(path, path.parent)
    if reason:
        raise RecordError(f"{path}: {reason}; a record is plain files")


def _lines(path: Path, whole: bool = True) -> Iterator[str]:
    for line in _read(path):
        if line.endswith("\n"):
            yield line[:-1]
        elif whole:
            raise RecordError(f"{path}: its last line was cut short")


def _read(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from file
    except FileNotFoundError:
        raise RecordError(f"{path}: missing; was this run recorded?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from None
