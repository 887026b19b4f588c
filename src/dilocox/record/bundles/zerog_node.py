"""A storage node of 0G Storage, by JSON-RPC over HTTP. It may be dead, slow or dishonest.

Nothing that a node says is believed: callers compare data with roots and digests. Every answer has
limits in bytes and in time.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import urllib3

from dilocox.errors import RecordError
from dilocox.record.bundles.place import (
    AT_ONCE,
    CALL_SECONDS,
    SLOWEST,
    WRITTEN,
    patiently,
    refuse_password,
)
from dilocox.record.bundles.zerog_root import CHUNK, SEGMENT, SEGMENT_CHUNKS, FileTree
from dilocox.record.log.blob_store import MissingError
from dilocox.utils.plain_text import plain

SCHEMES = {"zerog": "http", "zerog+https": "https"}
"""Protocols of the URLs that users give, and what they stand for."""
_URL = re.compile(
    r"(zerog|zerog\+https)://(?:(?:0x)?([0-9a-f]{64})@)?([A-Za-z0-9.:\[\]-]+)/?", re.ASCII
)
_SMALL = 1 << 20
"""Limit in bytes of answers without data."""
_HAS_IT = re.compile("already|being uploaded")
"""Part of a node's message on a segment that it has, or on a file that it has whole."""
_BUSY = "too many data"
"""Part of a node's message that it takes no more at this moment."""
_MOST_SIZE = 1 << 40

T = TypeVar("T")


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
    return url.partition("://")[0] in SCHEMES


@dataclass(frozen=True)
class FileInfo:
    """What a node says about a file."""

    size: int
    """Bytes."""
    sequence: int
    """Number of the submission at the contract."""
    finalized: bool
    """Whether the node has all of the file."""
    segments: int
    """Number of segments that the node has."""


class ZerogNode:
    """A storage node."""

    def __init__(self, url: ZerogUrl, patience: float, seconds: float = CALL_SECONDS) -> None:
        """Nothing is asked yet.

        Args:
            url: Where the node is.
            patience: Seconds for which a failing call is repeated.
            seconds: Time limit of one call, beside the time for its bytes.
        """
        self.url = url.text
        self._rpc, self._patience, self._seconds = url.node, patience, seconds
        self._pool = urllib3.PoolManager(maxsize=AT_ONCE, retries=False)

    def info(self, root: str) -> FileInfo | None:
        """Return what the node says about the newest file of a root; None if it knows none.

        Raises `RecordError` if the node fails.
        """

        def parse(said: Any) -> FileInfo | None:
            if said is None:
                return None
            about = said["tx"]
            numbers = about["size"], about["seq"], said["uploadedSegNum"]
            if not all(type(each) is int and 0 <= each < _MOST_SIZE for each in numbers):
                raise ValueError(f"numbers {numbers}")
            return FileInfo(*numbers[:2], said["finalized"] is True, numbers[2])

        return self._call("zgs_getFileInfo", [f"0x{root}", False], parse, "looked up", root)

    def check_whole(self) -> None:
        """Raise `RecordError` if the node keeps only a part of each file, or fails."""

        def parse(said: Any) -> tuple[int, int]:
            return int(said["shardId"]), int(said["numShard"])

        shard, shards = self._call("zgs_getShardConfig", [], parse, "read", "shards")
        if shards != 1:
            raise RecordError(
                f"{self.url}: keeps part {shard} of {shards} of each file; name a node that keeps "
                "all parts"
            )

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
        data = self._call("zgs_downloadSegment", call, parse, "read", root, answer=2 * SEGMENT)
        if data is None:
            raise MissingError(f"{self.url}: does not have the file of root {root}")
        return data

    def upload(self, tree: FileTree, sequence: int, first: int, pieces: Sequence[bytes]) -> None:
        """Upload segments of a file in one call.

        Args:
            tree: The file's tree.
            sequence: Number of the file's submission.
            first: Number of the first segment.
            pieces: The segments' bytes; those of the file's last segment are filled with zeros to
                whole chunks.

        Raises:
            RecordError: The node fails, or refuses.
        """
        body = self.upload_request(tree, sequence, first, pieces)

        def refused(message: str) -> bool:
            return _HAS_IT.search(message) is None

        self._post(body, lambda said: None, WRITTEN, tree.root.hex(), _SMALL, refused)

    def upload_request(
        self, tree: FileTree, sequence: int, first: int, pieces: Sequence[bytes]
    ) -> bytes:
        """Return the body of the request of `upload`."""
        root, segments = f"0x{tree.root.hex()}", []
        for number, piece in enumerate(pieces, first):
            hashes, lefts = tree.proof(number)
            about = {
                "root": root, "index": number, "fileSize": tree.size,
                "proof": {"lemma": [f"0x{each.hex()}" for each in hashes], "path": lefts},
            }  # fmt: skip
            # The data is put in here, because `json` would look at every byte of it.
            data = base64.b64encode(piece)
            segments.append(b'{"data":"%b",%b' % (data, json.dumps(about).encode()[1:]))
        params = b"[[%b],%d]" % (b",".join(segments), sequence)
        return _request("zgs_uploadSegmentsByTxSeq", params)

    def _call(
        self, method: str, params: list[Any], parse: Callable[[Any], T], done: str, what: str,
        answer: int = _SMALL,
    ) -> T:  # fmt: skip
        body = _request(method, json.dumps(params).encode())
        return self._post(body, parse, done, what, answer, lambda message: True)

    def _post(
        self, body: bytes, parse: Callable[[Any], T], done: str, what: str, answer: int,
        refused: Callable[[str], bool],
    ) -> T:  # fmt: skip
        """Send a request and parse its result.

        `answer`: limit in bytes of the answer. `refused`: whether a node's message is a refusal.
        """

        def once() -> T:
            said = json.loads(self._exchange(body, answer))
            message = _message(said)
            if message is not None:
                if _BUSY in message:
                    raise OSError(message)
                if refused(message):
                    raise RecordError(f"{self.url}/{what}: the node refuses: {plain(message)}")
                return parse(None)
            try:
                return parse(said["result"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"an answer of another form: {error}") from None

        limit = self._seconds + (len(body) + answer) / SLOWEST
        return patiently(once, f"{self.url}/{what}", done, limit, self._patience)

    def _exchange(self, body: bytes, most: int) -> bytes:
        """Post a request; return at most `most` bytes. Raises `OSError` and `ValueError`."""
        try:
            response = self._pool.request(
                "POST", self._rpc, body=body, headers={"Content-Type": "application/json"},
                preload_content=False, redirect=False, timeout=self._seconds,
            )  # fmt: skip
            data = response.read(most + 1)
        except urllib3.exceptions.HTTPError as error:
            raise OSError(_told(error)) from None
        if len(data) > most:
            response.close()
            raise ValueError(f"an answer of more than {most:,} bytes")
        response.release_conn()
        if response.status != 200:
            raise OSError(f"HTTP status {response.status}")
        return data


def _request(method: str, params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"method":"%b","params":%b}' % (method.encode(), params)


def _message(said: Any) -> str | None:
    """Return the text of an error; None if the answer is none."""
    if not isinstance(said, dict) or said.get("error") is None:
        return None
    error = said["error"]
    parts = (error.get("message"), error.get("data")) if isinstance(error, dict) else (error,)
    return "; ".join(str(each)[:150] for each in parts if each)


def _told(error: Exception) -> str:
    """Return the reason of a failed connection without the objects that urllib3 names."""
    reason = error.__cause__ or error.__context__
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return re.sub(r"<[^>]*>:? ?|\w+\(host='[^']*', port=\d+\): ?", "", str(error))
