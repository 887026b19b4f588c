"""Fetches a run that was published in bundles to a temporary folder, for verification.

The storage belongs to a stranger. Every part of a bundle is compared with its signed digest before
a byte of it is parsed. The sizes that the index names limit what is fetched, and the free disk
limits these sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dilocox.errors import RecordError
from dilocox.record.bundles.place import CALL_SECONDS, DeniedError, Place, in_order
from dilocox.record.bundles.publication import INDEX, Bundle, OtherLogError, Publication
from dilocox.record.bundles.tar_members import STATEMENTS, MalformedError, members
from dilocox.record.bundles.zerog_node import is_zerog
from dilocox.record.bundles.zerog_reader import ZerogReader
from dilocox.record.bundles.zerog_root import RootBuilder
from dilocox.record.log.blob_store import MissingError
from dilocox.record.log.bounded_reads import TooLargeError
from dilocox.record.log.digests import sha256
from dilocox.record.log.transparency_log import ENTRIES

Progress = Callable[[str, float], None]


class BadBundleError(RecordError):
    """Bytes that are not what the index's signer has published, or a malformed bundle."""


class OtherIndexError(BadBundleError):
    """An index of another log."""


class BundleStorage(Protocol):
    """A storage from which bundles are read."""

    url: str

    def get_index(self) -> bytes:
        """Return the index. Raises `MissingError`, and `RecordError` if the storage fails."""

    def get_part(self, bundle: Bundle, number: int) -> bytes:
        """Return a part of a bundle. Raises `TooLargeError` and like `get_index`."""


def open_bundles(url: str, patience: float = 0.0, seconds: float = CALL_SECONDS) -> BundleStorage:
    """Open the storage of a published run; nothing is read yet.

    Args:
        url: Folder, URL that fsspec knows, or `zerog://ROOT@HOST:PORT`.
        patience: Seconds for which a failing call is repeated.
        seconds: Time limit of one call, beside the time for its bytes.

    Raises:
        RecordError: There is no storage of this form, or its package is missing.
    """
    return (ZerogReader if is_zerog(url) else Place)(url, patience, seconds)


@dataclass
class Fetched:
    """A run that was fetched from bundles."""

    folder: Path
    """Temporary folder in the form of a run's folder."""
    where: str
    """The URL."""
    publication: Publication | None = None
    """The index; None if it is not authentic."""
    fault: str = ""
    """Why the bundles are not what was published; empty if they are. Nothing else can be judged
    then."""
    bundles: list[Bundle] = field(default_factory=list)
    """Bundles that were fetched whole."""


def is_bundled(url: str) -> bool:
    """Return True if there is a run in bundles at `url`, a folder or URL.

    0G Storage has nothing but bundles. Raises `RecordError` if the storage cannot be asked.
    """
    if is_zerog(url):
        return True
    try:
        Place(url).get_index()
    except (MissingError, DeniedError):
        return False
    return True


def read_index(place: BundleStorage, key: str | None = None) -> Publication:
    """Read the index of a published run.

    `key`: the log's key, from another source; None: the key that the index names. Raises
    `MissingError` if there is no index, `OtherIndexError` if it is of another log, `BadBundleError`
    if it is not authentic, and `RecordError` if the storage fails.
    """
    data = place.get_index()
    try:
        return Publication.parse(data.decode("utf-8"), key)
    except OtherLogError as error:
        raise OtherIndexError(f"{INDEX}: {error}") from None
    except (RecordError, UnicodeDecodeError) as error:
        raise BadBundleError(f"{INDEX}: {error}") from None


@contextlib.contextmanager
def fetched(
    place: BundleStorage, key: str | None, progress: Progress = lambda what, share: None
) -> Iterator[Fetched]:
    """Yield a published run in a temporary folder, which is removed afterwards.

    Bytes that differ from what was published end the fetch, and are named in `Fetched.fault`.
    Raises `RecordError` if the storage fails, or if the bundles need more than half of the disk's
    free space.
    """
    with tempfile.TemporaryDirectory(prefix="dilocox-verify-") as name:
        found = Fetched(Path(name), place.url)
        try:
            found.publication = read_index(place, key)
            fetch_into(found, place, progress)
        except BadBundleError as error:
            found.fault = str(error)
        yield found


def fetch_into(found: Fetched, place: BundleStorage, progress: Progress) -> None:
    """Fetch the bundles of `found.publication` that are not in `found.folder` yet.

    `progress`: called before each bundle and after each part; it may raise. Raises
    `BadBundleError`, and `RecordError` like `fetched`.
    """
    assert found.publication is not None
    bundles = found.publication.bundles[len(found.bundles) :]
    size, room = sum(each.size for each in bundles), shutil.disk_usage(found.folder).free // 2
    if size > room:
        raise RecordError(
            f"{place.url}: has {size:,} bytes in bundles, {room:,} are allowed here (half of the "
            f"free disk at {tempfile.gettempdir()}); free some disk"
        )
    for number, bundle in enumerate(bundles):

        def tell(share: float, number: int = number) -> None:
            progress("fetching bundles", (number + share) / len(bundles))

        tell(0.0)
        try:
            with contextlib.closing(_Parts(bundle, place, tell)) as parts:
                _unpack(bundle, parts, found.folder)
        except MissingError:
            raise BadBundleError(f"{bundle.name}: was published, but is not there") from None
        except MalformedError as error:
            raise BadBundleError(f"{bundle.name}: {error}") from None
        found.bundles.append(bundle)


class _Parts:
    """The bytes of a bundle. Every part is checked before any of its bytes is given out."""

    def __init__(
        self, bundle: Bundle, place: BundleStorage, progress: Callable[[float], None]
    ) -> None:
        """`progress`: called with the share of the parts that are here, 0 to 1."""
        paths = bundle.paths()
        self._progress, self._done = progress, 0

        def get(number: int) -> tuple[str, str, bytes]:
            try:
                data = place.get_part(bundle, number)
            except TooLargeError:
                data = b""
            return paths[number], bundle.parts[number], data

        self._left = in_order(get, range(len(paths)))
        self._data, self._at = b"", 0
        self._bundle, self._whole = bundle, hashlib.sha256()
        self._tree = RootBuilder() if bundle.zerog else None

    def check_end(self) -> None:
        """Raise `MalformedError` unless all bytes are those that the index names."""
        bundle = self._bundle
        if self._whole.hexdigest() != bundle.digest:
            raise MalformedError("has other bytes than were published")
        if self._tree and bundle.zerog and self._tree.finish().root.hex() != bundle.zerog.root:
            raise MalformedError("has another root in 0G Storage than was published")

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the bundle."""
        found = bytearray()
        while len(found) < size:
            if self._at == len(self._data) and not self._next():
                break
            piece = self._data[self._at : self._at + size - len(found)]
            self._at += len(piece)
            found += piece
        return bytes(found)

    def close(self) -> None:
        """End the fetches that have begun."""
        self._left.close()

    def _next(self) -> bool:
        path, digest, data = next(self._left, ("", "", b""))
        if not path:
            return False
        if sha256(data) != digest:
            raise MalformedError(f"{path} has other bytes than were published")
        self._whole.update(data)
        if self._tree:
            self._tree.update(data)
        self._data, self._at = data, 0
        self._done += 1
        self._progress(self._done / len(self._bundle.parts))
        return True


def _unpack(bundle: Bundle, parts: _Parts, folder: Path) -> None:
    own = STATEMENTS.format(bundle.number)
    for name, _, content in members(parts.read, bundle.size):
        if name.startswith("record/statements-"):
            if name != own:
                raise MalformedError(f"{name} does not belong to this bundle")
            _write(folder / "record" / ENTRIES, content, "ab")
        elif "/store/" not in name or not (folder / name).exists():
            _write(folder / name, content, "wb")
    parts.check_end()


def _write(path: Path, content: Iterator[bytes], mode: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        for piece in content:
            file.write(piece)
