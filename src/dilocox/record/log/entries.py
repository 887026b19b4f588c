"""The entries of a log on the disk, read whenever somebody goes through them: a long run's log is
larger than memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from dilocox.errors import RecordError
from dilocox.utils.storage import unsafe_reason


class FileEntries(Sequence[str]):
    """The lines of a file that does not change meanwhile, or a run of them."""

    def __init__(self, path: Path, first: int = 0, end: int | None = None) -> None:
        """`first`, `end`: which lines; none: to the last one. Raises `RecordError` for a file that
        is no plain one, cannot be read or whose last line has no end."""
        self._path, self._first = path, first
        if end is None:
            _check(path)
            end = sum(1 for _ in _lines(path))
        self._end = max(first, end)

    @classmethod
    def covered(cls, path: Path, most: int) -> FileEntries:
        """The first lines of a file that is being written, so many or as many as it has. A last one
        without an end is none. Raises `RecordError` for a file that cannot be read."""
        _check(path)
        found = sum(1 for _ in itertools.islice(_lines(path, whole=False), most))
        return cls(path, 0, found)

    def __len__(self) -> int:
        return self._end - self._first

    def __iter__(self) -> Iterator[str]:
        """One after the other, in one reading. Raises `RecordError`."""
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
    """The lines of a file of a record, each with its end, read one after the other.

    Raises `RecordError` for a file that is no plain one or cannot be read.
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
