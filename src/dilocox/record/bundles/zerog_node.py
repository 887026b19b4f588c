"""Storage nodes of 0G Storage: each keeps all segments of a file, or a part of them.

Nothing that a node says is believed: callers compare data with roots and digests.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.errors import RecordError
from dilocox.record.bundles.place import WRITTEN, refuse_password
from dilocox.record.bundles.zerog_root import CHUNK, SEGMENT, SEGMENT_CHUNKS, FileTree
from dilocox.record.bundles.zerog_rpc import SMALL, JsonRpc, request
from dilocox.record.log.blob_store import MissingError

SCHEMES = {"zerog": "http", "zerog+https": "https"}
"""Protocols of the URLs that users give, and what they stand for."""
_URL = re.compile(
    r"(zerog|zerog\+https)://(?:(?:0x)?([0-9a-f]{64})@)?([A-Za-z0-9.:\[\]-]+)/?", re.ASCII
)
_HAS_IT = re.compile("already|being uploaded")
"""Part of a node's message on a segment that it has, or on a file that it has whole."""
_MOST_SIZE = 1 << 40
_SHARDS = 1024
"""Most parts that segments are divided into."""


@dataclass(frozen=True)
class ZerogUrl:
    """A URL `zerog://[ROOT@]HOST[:PORT]` of a storage node, and perhaps of an index there."""

    node: str
    """URL of the node's JSON-RPC."""
    root: str
    """Root of the index, hex; empty if none is named."""
    text: str
    """The URL without a root."""

    @classmethod
    def parse(cls, url: str) -> ZerogUrl:
        """Parse a URL. Raises `RecordError` if it is none, or has a password in it."""
        refuse_password(url)
        found = _URL.fullmatch(url)
        if found is None:
            raise RecordError(
                f"{url[:200]}: not a URL of 0G Storage; write zerog://HOST:PORT, or "
                "zerog://ROOT@HOST:PORT with the 64 hex digits that `dilocox publish` printed"
            )
        scheme, root, host = found.groups()
        return cls(f"{SCHEMES[scheme]}://{host}", root or "", f"{scheme}://{host}")

    def at(self, root: str) -> str:
        """Return the URL of the index with this root."""
        return self.text.replace("://", f"://{root}@", 1)


def is_zerog(url: str) -> bool:
    """Return whether a URL has a protocol of 0G Storage."""
    scheme, mark, _ = url.partition("://")
    return bool(mark) and scheme in SCHEMES


@dataclass(frozen=True)
class FileInfo:
    """What a node says about a file."""

    size: int
    """Bytes."""
    sequence: int
    """Number of the submission at the contract."""
    finalized: bool
    """Whether the node has all of the file that it keeps, and has not dropped it."""
    segments: int
    """Number of segments that the node has."""
    start: int
    """Place of the file's first chunk among all chunks of the contract."""

    def global_segment(self, number: int) -> int:
        """Return the place of a segment of the file among all segments of the contract."""
        return self.start // SEGMENT_CHUNKS + number


@dataclass(frozen=True)
class Shard:
    """The part of all segments that a node keeps."""

    number: int
    count: int

    def holds(self, segment: int) -> bool:
        """Return whether the node keeps a segment, by its place among all segments."""
        return segment % self.count == self.number

    @classmethod
    def parse(cls, said: Any) -> Shard:
        """Parse a node's answer. Raises `KeyError`, `TypeError` or `ValueError`."""
        number, count = said["shardId"], said["numShard"]
        if type(number) is not int or type(count) is not int or not 0 <= number < count <= _SHARDS:
            raise ValueError(f"shard {number} of {count}")
        return cls(number, count)


class ZerogNode:
    """A storage node."""

    def __init__(self, rpc: JsonRpc, shard: Shard = Shard(0, 1)) -> None:
        """Nothing is asked. `shard`: the part that the node keeps."""
        self.shard = shard
        self._rpc = rpc

    @property
    def name(self) -> str:
        """The node, for messages."""
        return self._rpc.name

    def info(self, root: str) -> FileInfo | None:
        """Return what the node says about the newest file of a root; None if it knows none.

        Raises `RecordError` if the node fails.
        """

        def parse(said: Any) -> FileInfo | None:
            if said is None:
                return None
            about = said["tx"]
            place = about["size"], about["seq"], about["startEntryIndex"]
            numbers = (*place, said["uploadedSegNum"])
            if not all(type(each) is int and 0 <= each < _MOST_SIZE for each in numbers):
                raise ValueError(f"numbers {numbers}")
            size, sequence, start, segments = numbers
            whole = said["finalized"] is True and said.get("pruned") is not True
            return FileInfo(size, sequence, whole, segments, start)

        return self._rpc.call("zgs_getFileInfo", [f"0x{root}", False], parse, "looked up", root)

    def ask_shard(self) -> Shard:
        """Return the part that the node says it keeps.

        Raises `RefusedCallError` if it is no storage node, and `RecordError` if it fails.
        """
        return self._rpc.call("zgs_getShardConfig", [], Shard.parse, "read", "shards")

    def segment(self, root: str, number: int, size: int) -> bytes:
        """Return the bytes of a segment; the last ones of the file may be zeros that fill it.

        Args:
            root: Root of the file, hex.
            number: Number of the segment, from 0.
            size: Bytes of the file.

        Raises:
            MissingError: The node does not have it.
            RecordError: The node fails, or answers with another number of bytes.
        """
        first = number * SEGMENT_CHUNKS
        end = min(first + SEGMENT_CHUNKS, -(-size // CHUNK))

        def parse(said: Any) -> bytes | None:
            if said is None:
                return None
            data = base64.b64decode(said, validate=True)
            if len(data) != (end - first) * CHUNK:
                raise ValueError(f"{len(data)} bytes, not {(end - first) * CHUNK}")
            return data

        call = [f"0x{root}", first, end]
        data = self._rpc.call("zgs_downloadSegment", call, parse, "read", root, 2 * SEGMENT)
        if data is None:
            raise MissingError(f"{self.name}: does not have the file of root {root}")
        return data

    def upload(self, tree: FileTree, sequence: int, segments: Sequence[tuple[int, bytes]]) -> None:
        """Upload segments of a file in one call.

        Args:
            tree: The file's tree.
            sequence: Number of the file's submission.
            segments: Numbers and bytes of segments; those of the file's last segment are filled
                with zeros to whole chunks.

        Raises:
            RecordError: The node fails, or refuses.
        """
        root, parts = f"0x{tree.root.hex()}", []
        for number, data in segments:
            hashes, lefts = tree.proof(number)
            about = {
                "root": root, "index": number, "fileSize": tree.size,
                "proof": {"lemma": [f"0x{each.hex()}" for each in hashes], "path": lefts},
            }  # fmt: skip
            # The data is put in here, because `json` would look at every byte of it.
            rest = json.dumps(about).encode()[1:]
            parts.append(b'{"data":"%b",%b' % (base64.b64encode(data), rest))
        body = request("zgs_uploadSegmentsByTxSeq", b"[[%b],%d]" % (b",".join(parts), sequence))

        def refused(message: str) -> bool:
            return _HAS_IT.search(message) is None

        self._rpc.post(body, lambda said: None, WRITTEN, tree.root.hex(), SMALL, refused)
