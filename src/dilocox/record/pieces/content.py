"""Bytes that are cut into pieces: objects one after the other, read range by range.

The payloads of a round may be larger than the memory that training leaves: they are never joined.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dilocox.errors import RecordError

CHUNK = 1 << 22
"""Bytes that are hashed at once."""


class Part(Protocol):
    """One object."""

    @property
    def size(self) -> int:
        """Bytes of the object."""

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return the bytes from `start` to `end`, exclusive. Raises `RecordError`."""


@dataclass(frozen=True)
class InMemory:
    """An object in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """See `Part`."""
        return len(self.data)

    def read(self, start: int, end: int) -> memoryview:
        """See `Part`."""
        return memoryview(self.data)[start:end]


@dataclass(frozen=True)
class OnDisk:
    """An object in a file of a known size."""

    path: Path
    size: int

    def read(self, start: int, end: int) -> bytes:
        """See `Part`."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                found = file.read(end - start)
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be read ({error.strerror})") from None
        if len(found) != end - start:
            raise RecordError(f"{self.path}: has fewer bytes than it had")
        return found


class Content:
    """Objects one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(part.size for part in parts))
        self.size = self._ends[-1] if parts else 0
        """Bytes of all objects together."""

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return the bytes from `start` to `end`, without those beyond the content's end.

        Raises `RecordError`.
        """
        found: list[bytes | memoryview] = []
        end = min(end, self.size)
        number = bisect.bisect_right(self._ends, start)
        while start < end:
            part = self._parts[number]
            first = self._ends[number] - part.size
            upto = min(end, self._ends[number])
            found.append(part.read(start - first, upto - first))
            start, number = upto, number + 1
        return found[0] if len(found) == 1 else b"".join(found)


def digest_of(part: Part) -> str:
    """Return the SHA-256 of an object, hex, reading it chunk by chunk. Raises `RecordError`."""
    total = hashlib.sha256()
    for start in range(0, part.size, CHUNK):
        total.update(part.read(start, min(start + CHUNK, part.size)))
    return total.hexdigest()
