"""Builds the tar file of one bundle in a temporary file."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.bundles.publication import Bundle
from dilocox.record.bundles.tar_members import CHUNK, END, header, padding
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.log.digests import sha256

PART_SIZE = 2**20
"""Bytes of a part. An upload that was cut goes on with the parts that are not there. With a limit
of the uplink, a part is what is sent at once, so a part must be small beside a slow link."""
BUNDLE_SIZE = 2**30
"""Bytes of files after which another bundle begins. A larger file has a bundle of its own."""


class BundleFile:
    """The tar file of a bundle that is being built."""

    def __init__(self, folder: Path) -> None:
        """Begin a tar file. `folder`: where the temporary file lies; it never has a name."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self.size = 0
        """Bytes so far, without the end."""
        self.files: dict[str, str] = {}
        """SHA-256 of the files that `add` was told to name."""

    def __enter__(self) -> BundleFile:
        """Return this file, which the end of the context removes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the temporary file."""
        self._file.close()

    def add(self, name: str, size: int, content: Iterator[bytes], named: bool = False) -> None:
        """Append a file of `size` bytes.

        `named`: note its digest in `files`. Raises `RecordError` if the content has another size,
        or if the disk is full.
        """
        digest, left = hashlib.sha256(), size
        try:
            self._file.write(header(name, size))
            for piece in content:
                self._file.write(piece)
                digest.update(piece)
                left -= len(piece)
            self._file.write(padding(size))
        except OSError as error:
            raise RecordError(
                f"{name}: cannot be copied into a bundle ({error.strerror}); a bundle needs up to "
                f"{BUNDLE_SIZE / 1e9:.1f} GB of disk in the run's folder"
            ) from None
        if left:
            raise RecordError(f"{name}: changed while it was published; publish again")
        self.size += len(header(name, size)) + size + len(padding(size))
        if named:
            self.files[name] = digest.hexdigest()

    def finish(
        self, number: int, head: Prefix, *, toward: int = 0, until: str = "", missing: int = 0,
        last: bool = False,
    ) -> Bundle:  # fmt: skip
        """End the tar file, and return the bundle. See `Bundle` for the arguments."""
        self._file.write(END)
        whole, parts, size = hashlib.sha256(), [], 0
        for part in self.parts():
            whole.update(part)
            parts.append(sha256(part))
            size += len(part)
        return Bundle(
            number, whole.hexdigest(), size, PART_SIZE, tuple(parts), head, toward, until, missing,
            last, dict(self.files),
        )  # fmt: skip

    def clear(self) -> None:
        """Begin another tar file in the same place."""
        self._file.seek(0)
        self._file.truncate()
        self.size, self.files = 0, {}

    def parts(self) -> Iterator[bytes]:
        """Iterate over the parts of the tar file, each of `PART_SIZE` bytes but the last."""
        self._file.seek(0)
        while part := self._file.read(PART_SIZE):
            yield part


def pieces(path: Path) -> Iterator[bytes]:
    """Iterate over the bytes of a local file. Raises `OSError`."""
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece
