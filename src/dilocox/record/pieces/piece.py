"""One piece: its bytes, and the proof that it is under a signed root.

The root is that of a Merkle tree (RFC 6962) with one leaf for each piece, in order. A leaf's data
is the digest of the layout, and the piece. So a root fixes the pieces and what they are pieces of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.errors import RecordError
from dilocox.record.log.canonical import dumps
from dilocox.record.log.digests import digest_text
from dilocox.record.log.merkle import is_included, leaf_hash
from dilocox.record.pieces.errors import BadPieceError
from dilocox.record.pieces.layout import Layout

HEADER_BYTES = 1 << 23
"""Limit in bytes of a piece's first line."""


@dataclass(frozen=True)
class Piece:
    """Piece `index` of n, with its Merkle proof."""

    layout: Layout
    index: int
    data: bytes
    proof: tuple[bytes, ...]
    """Inclusion proof of the piece's leaf, from the leaf upwards, 32 bytes each."""

    @property
    def leaf(self) -> bytes:
        """The piece's leaf in the tree, 32 bytes."""
        return leaf_hash(self.layout.digest + self.data)

    def check(self, root: bytes) -> None:
        """Raise `BadPieceError` unless this is the piece under `root`, 32 bytes."""
        if len(self.data) != self.layout.piece_length:
            raise BadPieceError(
                f"piece {self.index} has {len(self.data)} bytes, its layout says "
                f"{self.layout.piece_length}"
            )
        if not is_included(self.leaf, self.index, self.layout.n, self.proof, root):
            raise BadPieceError(f"piece {self.index} is not the one under root {root.hex()[:12]}…")

    def to_bytes(self) -> bytes:
        """Encode as a file: one line of canonical JSON, then the data."""
        return self._header() + b"\n" + self.data

    def _header(self) -> bytes:
        proof = [each.hex() for each in self.proof]
        said = {"index": self.index, "layout": self.layout.to_json(), "proof": proof}
        return dumps(said)

    @classmethod
    def from_bytes(cls, file: bytes) -> Piece:
        """Parse `to_bytes`. Raises `BadPieceError` if `file` is something else."""
        end = file.find(b"\n", 0, HEADER_BYTES)
        try:
            if end < 0:
                raise ValueError(end)
            said = json.loads(file[:end])
            layout, index = Layout.from_json(said["layout"]), said["index"]
            proof = tuple(bytes.fromhex(digest_text(each)) for each in said["proof"])
            if type(index) is not int or not 0 <= index < layout.n:
                raise ValueError(index)
            piece = cls(layout, index, file[end + 1 :], proof)
            if piece._header() != file[:end]:
                raise ValueError("not canonical")
        except (RecordError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise BadPieceError("is not a piece") from None
        return piece


def check_all(pieces: Sequence[Piece], root: bytes) -> None:
    """Raise `BadPieceError` for the first piece that is not under `root`, 32 bytes."""
    for each in pieces:
        each.check(root)
