"""A small recorded run that tests publish in bundles, and a storage that can be cut."""

from __future__ import annotations

import threading
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.bundles.fetch import fetched, open_bundles
from dilocox.record.bundles.place import Place
from dilocox.record.verify.places import Places
from dilocox.record.verify.published_bundles import verify_fetched
from dilocox.record.verify.verify import Report
from dilocox.tools.storage.destination import FilesDestination
from dilocox.tools.storage.publisher import Publisher
from dilocox.tools.storage.run_source import RunSource
from dilocox.tools.storage.uplink import Uplink


class CutPlace(Place):
    """A place whose connection is cut before a given number of writes, until it is mended."""

    def __init__(self, url: str, writes: int | None = None, seconds: float = 60.0) -> None:
        super().__init__(url, seconds=seconds)
        self.left = writes
        """Writes that still work; None: all."""
        self.written: list[str] = []
        self._lock = threading.Lock()

    def put(self, path: str, data: bytes) -> None:
        """Write a file, unless the connection is cut."""
        with self._lock:  # several threads write
            if self.left == 0:
                raise RecordError(f"{self.url}/{path}: cannot be written (connection reset)")
            if self.left is not None:
                self.left -= 1
        super().put(path, data)
        self.written.append(path)


def publisher(run: Path, place: Place, every: int = 1) -> Publisher:
    """A fresh publisher, as a new process has it."""
    return Publisher(RunSource(run), FilesDestination(place), every, Uplink(None))


def verified(url: str, key: str | None = None, seconds: float = 60.0) -> Report:
    """Verify what is published at `url`, from the bundles alone."""
    with fetched(open_bundles(url, seconds=seconds), key) as found:
        return verify_fetched(found, Places(found.folder, key=key), lambda what, share: None)


def verdicts(report: Report) -> dict[str, str]:
    """Verdicts by claim."""
    return {each.claim.name: each.verdict for each in report.findings}


def reasons(report: Report) -> dict[str, str]:
    """Reasons by claim, without the folder that was verified."""
    return {each.claim.name: each.reason for each in report.findings}
