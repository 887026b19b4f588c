"""Journal of the payloads that a rank has stored, but not yet cut and signed."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.log.digests import digest_text
from dilocox.utils.json_lines import lines_of_text
from dilocox.utils.storage import replace_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """The stored payloads of one exchange."""

    exchange: str
    contributors: int
    """Number of sites whose payloads count; theirs come first in `objects`."""
    objects: tuple[tuple[str, int], ...]
    """(SHA-256 in hex, bytes)."""


class Journal:
    """A file of JSON lines: `+` for what was stored, `-` for what is done.

    Nothing is flushed to the disk: after a power cut the last lines may be missing, and then the
    pieces of a few exchanges. A journal that cannot be written loses nothing while the rank lives.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._left: dict[Stored, None] = {}
        self._read()

    def left(self) -> list[Stored]:
        """Return what is stored but not done, oldest first."""
        with self._lock:
            return list(self._left)

    def add(self, stored: Stored) -> None:
        """Note payloads that are stored now."""
        with self._lock:
            self._left[stored] = None
            self._append(["+", stored.exchange, stored.contributors, stored.objects])

    def done(self, several: Sequence[Stored]) -> None:
        """Note that these payloads are done."""
        with self._lock:
            for each in several:
                self._left.pop(each, None)
                self._append(["-", each.exchange, each.contributors, each.objects])

    def _append(self, line: list[object]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            log.warning("%s: cannot be written (%s)", self._path, error.strerror)

    def _read(self) -> None:
        """Read the file, and write it anew without what is done."""
        if not self._path.exists():
            return
        try:
            for line in lines_of_text(self._path.read_bytes().decode("utf-8")):
                self._line(line)
            lines = [["+", s.exchange, s.contributors, s.objects] for s in self._left]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            replace_file(self._path, text.encode())
        except (OSError, UnicodeDecodeError) as error:
            log.warning("%s: cannot be read (%s)", self._path, error)

    def _line(self, line: str) -> None:
        try:
            sign, exchange, contributors, objects = json.loads(line)
            found = tuple((digest_text(digest), int(size)) for digest, size in objects)
            stored = Stored(str(exchange), int(contributors), found)
        except (ValueError, TypeError, RecordError):
            return  # the last line of a killed process
        if sign == "+":
            self._left[stored] = None
        else:
            self._left.pop(stored, None)
