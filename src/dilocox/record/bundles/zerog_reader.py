"""Reads a run's bundles from 0G Storage: `zerog://ROOT@HOST:PORT`, by the root of their index.

The root names the bytes of the index, so nobody can show another one. The index has the root of
each bundle, and the digests of its parts.
"""

from __future__ import annotations

from dilocox.errors import RecordError
from dilocox.record.bundles.place import CALL_SECONDS
from dilocox.record.bundles.publication import INDEX, INDEX_BYTES, Bundle
from dilocox.record.bundles.tar_members import MalformedError
from dilocox.record.bundles.zerog_network import ZerogNetwork
from dilocox.record.bundles.zerog_node import ZerogUrl
from dilocox.record.bundles.zerog_root import SEGMENT, keccak_256, tree_of
from dilocox.record.log.blob_store import MissingError


class ZerogReader:
    """A published run at storage nodes."""

    def __init__(self, url: str, patience: float = 0.0, seconds: float = CALL_SECONDS) -> None:
        """Look at a URL; the node is not asked yet.

        Args:
            url: `zerog://ROOT@HOST:PORT`.
            patience: Seconds for which a failing call is repeated.
            seconds: Time limit of one call, beside the time for its bytes.

        Raises:
            RecordError: The URL names no root, or the package for Keccak-256 is missing.
        """
        where = ZerogUrl.parse(url)
        if not where.root:
            raise RecordError(
                f"{url}: names no index; write {where.at('ROOT')} with the root that "
                "`dilocox publish` printed"
            )
        keccak_256()
        self.url = where.at(where.root)
        self._root = where.root
        self._nodes = ZerogNetwork(where, patience, seconds)

    def get_index(self) -> bytes:
        """Return the index of the published run.

        Raises `MissingError` if the node does not have it, and `RecordError` if the node fails or
        gives other bytes than the root stands for.
        """
        about = self._nodes.info(self._root)
        if about is None:
            raise MissingError(f"{self.url}: no node knows a file of this root")
        if not 0 < about.size <= INDEX_BYTES:
            raise RecordError(f"{self.url}: a file of {about.size:,} bytes is no {INDEX}")
        count = -(-about.size // SEGMENT)
        data = b"".join(self._nodes.segment(self._root, n, about.size) for n in range(count))
        if tree_of(data[: about.size]).root.hex() != self._root:
            raise RecordError(f"{self.url}: the node gives other bytes than the root stands for")
        return data[: about.size]

    def get_part(self, bundle: Bundle, number: int) -> bytes:
        """Return a part of a bundle.

        Raises `MissingError` if the node does not have it, `MalformedError` if the index does not
        say where it lies, and `RecordError` if the node fails.
        """
        if bundle.zerog is None or bundle.part_size % SEGMENT:
            raise MalformedError("the index does not say where it lies in 0G Storage")
        begin = number * bundle.part_size
        size = min(bundle.part_size, bundle.size - begin)
        first, end = begin // SEGMENT, -(-(begin + size) // SEGMENT)
        root = bundle.zerog.root
        data = b"".join(self._nodes.segment(root, n, bundle.size) for n in range(first, end))
        return data[:size]
