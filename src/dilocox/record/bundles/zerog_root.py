"""Roots of files in 0G Storage: a Merkle tree by Keccak-256 over chunks of 256 bytes.

A file is filled with zeros to whole chunks, and then to a multiple of a sixteenth of the next power
of two. Its tree has the shape of RFC 6962. 1,024 chunks make a segment, the unit of transfers. The
contract is told the roots of the largest complete subtrees from left to right.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.errors import RecordError

CHUNK = 256
"""Bytes of a chunk, whose hash is a leaf."""
SEGMENT_CHUNKS = 1024
SEGMENT = CHUNK * SEGMENT_CHUNKS
"""Bytes of a segment."""
_GRAIN = 16


@dataclass(frozen=True)
class Node:
    """A complete subtree of a file."""

    root: bytes
    height: int
    """It has 2**height chunks."""


@dataclass(frozen=True)
class FileTree:
    """The tree of one file."""

    size: int
    """Bytes of the file, without zeros that fill it."""
    segments: tuple[bytes, ...]
    """Root of each segment, zeros that fill the file included."""
    nodes: tuple[Node, ...]
    """The largest complete subtrees, from left to right."""
    levels: tuple[tuple[bytes, ...], ...]
    """Hashes from `segments` to the root. The last hash of an odd level is that of the next."""

    @property
    def root(self) -> bytes:
        """The root, 32 bytes."""
        return self.levels[-1][0]

    @property
    def sectors(self) -> int:
        """Number of chunks with those that fill the file; a contract sells them."""
        return sum(1 << node.height for node in self.nodes)

    @property
    def count(self) -> int:
        """Number of segments that have bytes of the file."""
        return -(-self.size // SEGMENT)

    def proof(self, segment: int) -> tuple[list[bytes], list[bool]]:
        """Return the proof of a segment, as storage nodes expect it.

        Returns:
            The segment's root, the hashes beside the path, and the tree's root; a tree of one
            segment has its root alone. Then for each step whether the path comes from the left.
        """
        if len(self.segments) == 1:
            return [self.root], []
        hashes, lefts = [self.segments[segment]], []
        for level in self.levels[:-1]:
            if segment ^ 1 < len(level):
                hashes.append(level[segment ^ 1])
                lefts.append(segment % 2 == 0)
            segment //= 2
        return [*hashes, self.root], lefts


class RootBuilder:
    """Computes the tree of a file that comes in pieces."""

    def __init__(self) -> None:
        """Begin a file. Raises `RecordError` if the package for Keccak-256 is missing."""
        self._keccak = keccak_256()
        self._rest = bytearray()
        self._segments: list[bytes] = []
        self._size = 0

    def update(self, data: bytes) -> None:
        """Append bytes."""
        self._size += len(data)
        view = memoryview(data)
        if self._rest:
            piece = view[: SEGMENT - len(self._rest)]
            self._rest += piece
            view = view[len(piece) :]
            if len(self._rest) < SEGMENT:
                return
            self._segments.append(self._segment(self._rest))
            self._rest = bytearray()
        whole = len(view) - len(view) % SEGMENT
        for begin in range(0, whole, SEGMENT):
            self._segments.append(self._segment(view[begin : begin + SEGMENT]))
        self._rest += view[whole:]

    def finish(self) -> FileTree:
        """Return the tree. Raises `RecordError` for a file without bytes."""
        if not self._size:
            raise RecordError("0G Storage takes no empty file")
        total = padded(-(-self._size // CHUNK))
        segments = list(self._segments)
        left = total - SEGMENT_CHUNKS * len(segments)
        last = bytes(self._rest)
        zeros = self._segment(bytes(SEGMENT)) if left > SEGMENT_CHUNKS else b""
        leaves: list[bytes] = []
        while left > 0:
            chunks = min(left, SEGMENT_CHUNKS)
            leaves = self._leaves(last.ljust(chunks * CHUNK, b"\0")) if last or not zeros else []
            segments.append(self._levels(leaves)[-1][0] if leaves else zeros)
            last, left = b"", left - chunks
        levels = self._levels(segments)
        nodes = self._nodes(segments, total, leaves)
        return FileTree(self._size, tuple(segments), nodes, tuple(map(tuple, levels)))

    def _nodes(
        self, segments: Sequence[bytes], total: int, leaves: Sequence[bytes]
    ) -> tuple[Node, ...]:
        """Return the complete subtrees. `leaves`: of the last segment, if it is not whole."""
        nodes, at = [], 0
        for height in reversed(range(total.bit_length())):
            chunks = 1 << height
            if not total & chunks:
                continue
            if chunks >= SEGMENT_CHUNKS:
                begin = at // SEGMENT_CHUNKS
                part = segments[begin : begin + chunks // SEGMENT_CHUNKS]
            else:
                begin = at % SEGMENT_CHUNKS
                part = leaves[begin : begin + chunks]
            nodes.append(Node(self._levels(part)[-1][0], height))
            at += chunks
        return tuple(nodes)

    def _segment(self, data: bytes | bytearray | memoryview) -> bytes:
        return self._levels(self._leaves(data))[-1][0]

    def _leaves(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        keccak = self._keccak
        return [keccak(data[at : at + CHUNK]).digest() for at in range(0, len(data), CHUNK)]

    def _levels(self, hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
        """Return the levels of a tree from its lowest to its root."""
        keccak, levels = self._keccak, [hashes]
        while len(hashes) > 1:
            above = [
                keccak(hashes[at] + hashes[at + 1]).digest() for at in range(0, len(hashes) - 1, 2)
            ]
            if len(hashes) % 2:
                above.append(hashes[-1])
            hashes = above
            levels.append(hashes)
        return levels


def tree_of(data: bytes) -> FileTree:
    """Return the tree of a file. Raises `RecordError` like `RootBuilder`."""
    builder = RootBuilder()
    builder.update(data)
    return builder.finish()


def identity(tree: FileTree) -> bytes:
    """Return the name by which the contract's events can be searched for a file, 32 bytes."""
    name: bytes = keccak_256()(b"".join(node.root for node in tree.nodes)).digest()
    return name


def padded(chunks: int) -> int:
    """Return the number of chunks to which a file of `chunks` chunks is filled with zeros."""
    power = 1 << (chunks - 1).bit_length()
    grain = max(1, power // _GRAIN) if power != chunks else power
    return -(-chunks // grain) * grain


def keccak_256() -> Any:
    """Return the constructor of a Keccak-256 hash.

    Raises `RecordError` if the package is not installed.
    """
    if importlib.util.find_spec("sha3") is None:
        raise RecordError("the package safe-pysha3 is not installed: pip install 'dilocox[zerog]'")
    import sha3

    return sha3.keccak_256
