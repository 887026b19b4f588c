"""Where a run is published to: folders and object storage, file by file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dilocox.errors import RecordError
from dilocox.record.bundles.fetch import BadBundleError, OtherIndexError, read_index
from dilocox.record.bundles.place import AT_ONCE, Place, in_order
from dilocox.record.bundles.publication import INDEX, Bundle, Publication
from dilocox.tools.storage.bundle_file import BundleFile
from dilocox.tools.storage.uplink import Uplink


class Destination(Protocol):
    """A storage that a run is published to."""

    @property
    def url(self) -> str:
        """The storage, for messages."""

    @property
    def published(self) -> str:
        """URL for `dilocox verify`."""

    @property
    def paid(self) -> bool:
        """True if each index costs money, so that only one that is due is shown."""

    def read_index(self, key: str) -> Publication:
        """Return the index of what was published. `key`: the log's key.

        Raises `MissingError` if there is none, `BadBundleError` if it is not authentic and will not
        become so, and `RecordError` if the storage fails, or may have answered with nonsense.
        """

    def send(self, file: BundleFile, bundle: Bundle, uplink: Uplink) -> tuple[Bundle, int]:
        """Upload what the storage does not have yet of a bundle.

        Returns the bundle as the index shall name it, and the number of bytes that were uploaded.
        Raises `RecordError`.
        """

    def send_index(self, text: str, due: bool, uplink: Uplink) -> None:
        """Take the newest index, of which all bundles were sent. Raises `RecordError`.

        `due`: the bundles since the last index outweigh this one. A storage in which a new index
        replaces the old one shows it now; others wait for `finish`.
        """

    def finish(self, text: str, uplink: Uplink) -> None:
        """Show readers the newest index, unless they see it. Raises `RecordError`."""


@dataclass
class FilesDestination:
    """A folder or object storage, where each part of a bundle is a file."""

    place: Place
    _written: str = field(default="", init=False)
    """Text of the index that the storage has, as far as this process knows."""
    _missing: list[str] = field(default_factory=list, init=False)
    """The first parts that the storage did not have, since an upload began or has failed."""
    _whole: str = field(default="", init=False)
    """Name of the last bundle of which this process has seen all parts in the storage."""

    @property
    def url(self) -> str:
        """The storage's URL."""
        return self.place.url

    @property
    def published(self) -> str:
        """The storage's URL."""
        return self.place.url

    @property
    def paid(self) -> bool:
        """False: a new index replaces the old one."""
        return False

    def read_index(self, key: str) -> Publication:
        """Read the index. Raises like `Destination.read_index`."""
        try:
            found = read_index(self.place, key)
        except OtherIndexError:
            raise
        except BadBundleError as error:
            if self.place.is_local:
                raise
            # A server, or a gateway before it, may answer with something else for a time.
            raise RecordError(
                f"{self.url}: {error}; if it stays so, choose another place, or empty this one"
            ) from None
        self._written = found.text
        return found

    def send(self, file: BundleFile, bundle: Bundle, uplink: Uplink) -> tuple[Bundle, int]:
        """Upload the parts that the storage does not have yet. Raises `RecordError`.

        A part of the right size that is there is read, because it may have other bytes. Parts are
        sent in order, at most `AT_ONCE` at a time. So once so many are missing, an earlier upload
        has sent none of the later ones, and the storage is not asked for them; nor for those of
        later bundles. A bundle that is sent again, because its index could not be written, is not
        looked at.
        """
        if bundle.name == self._whole:
            return bundle, 0

        def send(part: tuple[str, bytes]) -> int:
            path, data = part
            if len(self._missing) < AT_ONCE:
                if self.place.size(path) == len(data) and self.place.get(path, len(data)) == data:
                    return 0
                self._missing.append(path)
            uplink.take(len(data))
            self.place.put(path, data)
            if self.place.size(path) != len(data):
                raise RecordError(f"{self.url}/{path}: was written, but is not there whole")
            return len(data)

        try:
            sent = sum(in_order(send, zip(bundle.paths(), file.parts(), strict=True)))
        except Exception:
            self._missing.clear()  # the next attempt finds what this one has sent
            raise
        self._whole = bundle.name
        return bundle, sent

    def send_index(self, text: str, due: bool, uplink: Uplink) -> None:
        """Write the index if it is due. Raises `RecordError`."""
        if due:
            self.finish(text, uplink)

    def finish(self, text: str, uplink: Uplink) -> None:
        """Write the index, unless the storage has it. Raises `RecordError`."""
        if text == self._written:
            return
        data = text.encode()
        uplink.take(len(data))
        self.place.put(INDEX, data)
        self._written = text
