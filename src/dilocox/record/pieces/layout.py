"""The layout of pieces: which objects are cut, in what order, and into how many pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.errors import RecordError
from dilocox.record.log.canonical import dumps
from dilocox.record.log.digests import digest_text, sha256
from dilocox.record.pieces.content import Part, digest_of
from dilocox.record.pieces.erasure import block_length, check_sizes

FORMAT = 1
MOST_OBJECTS = 1 << 16
_LAST = 2**53


@dataclass(frozen=True)
class Layout:
    """How some objects, one after the other, are cut into n pieces of which k suffice."""

    k: int
    n: int
    objects: tuple[tuple[str, int], ...]
    """(SHA-256 in hex, bytes) of each object."""

    @property
    def size(self) -> int:
        """Bytes of all objects together."""
        return sum(size for _, size in self.objects)

    @property
    def piece_length(self) -> int:
        """Bytes of each piece's data."""
        return block_length(self.size, self.k)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        objects = [list(each) for each in self.objects]
        return {"format": FORMAT, "k": self.k, "n": self.n, "objects": objects}

    @property
    def digest(self) -> bytes:
        """SHA-256 of the layout in canonical JSON, 32 bytes; a part of every leaf."""
        return bytes.fromhex(sha256(dumps(self.to_json())))

    @classmethod
    def of(cls, objects: Sequence[Part], k: int, n: int) -> Layout:
        """Return the layout of these objects, which are read.

        Raises `RecordError` if there is no such code, or if an object cannot be read.
        """
        check_sizes(k, n)
        return cls(k, n, tuple((digest_of(each), each.size) for each in objects))

    @classmethod
    def from_json(cls, said: Any) -> Layout:
        """Parse `to_json`. Raises `RecordError` if it is malformed."""
        try:
            if said["format"] != FORMAT or set(said) != {"format", "k", "n", "objects"}:
                raise ValueError(said["format"])
            objects = tuple((digest_text(digest), _count(size)) for digest, size in said["objects"])
            if len(objects) > MOST_OBJECTS:
                raise ValueError(len(objects))
            check_sizes(said["k"], said["n"])
            return cls(said["k"], said["n"], objects)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RecordError("the layout of a piece is malformed") from None


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LAST:
        raise ValueError(value)
    return value
