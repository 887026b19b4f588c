"""Cuts objects into pieces. Pure: the same objects give the same root at every site."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dilocox.record.log.merkle import inclusion_proof, root_of
from dilocox.record.pieces.content import Content, InMemory, Part
from dilocox.record.pieces.erasure import encoded
from dilocox.record.pieces.layout import Layout
from dilocox.record.pieces.piece import Piece


@dataclass(frozen=True)
class Cut:
    """The tree over all pieces of some objects, and those pieces that were asked for."""

    layout: Layout
    leaves: tuple[bytes, ...]
    """Hash of each piece's leaf, 32 bytes."""
    root: bytes
    """Root of the tree over `leaves`, 32 bytes."""
    pieces: dict[int, Piece]
    """The wanted pieces by index."""


def cut(objects: Sequence[bytes], k: int, n: int, wanted: Collection[int] | None = None) -> Cut:
    """Cut objects in memory; see `cut_parts`."""
    return cut_parts([InMemory(each) for each in objects], k, n, wanted)


def cut_parts(
    objects: Sequence[Part], k: int, n: int, wanted: Collection[int] | None = None
) -> Cut:
    """Cut objects into n pieces, any k of which give the objects back.

    Args:
        objects: The objects, in their order. They are read twice, range by range.
        k: Number of pieces that suffice.
        n: Number of pieces.
        wanted: Indices of the pieces whose bytes are returned, and held in memory; None: all.

    Raises:
        RecordError: There is no such code, the package zfec is missing, or an object cannot be
            read.
    """
    layout = Layout.of(objects, k, n)
    wanted = range(n) if wanted is None else wanted
    # RFC 6962: the data of a leaf comes after a zero byte (`leaf_hash`).
    trees = [hashlib.sha256(b"\0" + layout.digest) for _ in range(n)]
    parts: dict[int, list[bytes]] = {index: [] for index in wanted}
    for slices in encoded(Content(objects), k, n):
        for tree, part in zip(trees, slices, strict=True):
            tree.update(part)
        for index, own in parts.items():
            own.append(bytes(slices[index]))
    leaves = tuple(tree.digest() for tree in trees)
    pieces = {
        index: Piece(layout, index, b"".join(own), tuple(inclusion_proof(leaves, index)))
        for index, own in parts.items()
    }
    return Cut(layout, leaves, root_of(leaves), pieces)
