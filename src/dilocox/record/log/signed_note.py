"""Signed notes and log checkpoints, in the formats that C2SP specifies.

A note (c2sp.org/signed-note) is a text that ends in a newline, then an empty line, then signature
lines `— NAME BASE64(key hash ‖ Ed25519 signature)`. A checkpoint (c2sp.org/tlog-checkpoint) is a
note of three lines: the log's origin, its size in decimal, its root in base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from dilocox.errors import RecordError
from dilocox.utils.plain_text import plain

_ED25519 = b"\x01"


@dataclass(frozen=True)
class NoteKey:
    """A public key that signs notes under a name."""

    name: str
    public: bytes
    """32 bytes, Ed25519."""

    @property
    def hash(self) -> bytes:
        """The 4 bytes that identify this key in a signature line."""
        return hashlib.sha256(self.name.encode() + b"\n" + _ED25519 + self.public).digest()[:4]

    def __str__(self) -> str:
        """Return the published form of the key: `NAME+HASH+BASE64`."""
        return f"{self.name}+{self.hash.hex()}+{_base64(_ED25519 + self.public)}"

    @classmethod
    def parse(cls, text: str) -> NoteKey:
        """Parse the form of `str`. Raises `RecordError` if the text is not such a key."""
        match = re.fullmatch(r"([^\s+]+)\+([0-9a-f]{8})\+(\S+)", text.strip())
        if match is not None and plain(match[1]) != match[1]:
            raise RecordError(f"log key {match[1][:80]!r}: its name has control characters")
        data = _decoded(match[3]) if match else b""
        if match is not None and len(data) == 33 and data[:1] == _ED25519:
            key = cls(match[1], data[1:])
            if key.hash.hex() == match[2]:
                return key
        raise RecordError(f"{text.strip()[:80]!r} is not a log key: copy it whole, NAME+HASH+KEY")


def sign_note(text: str, name: str, key: Ed25519PrivateKey) -> str:
    """Return `text` as a note with one signature. Raises `ValueError` without a final newline."""
    if not text.endswith("\n"):
        raise ValueError("the text of a note ends in a newline")
    public = NoteKey(name, key.public_key().public_bytes_raw())
    line = f"— {name} {_base64(public.hash + key.sign(text.encode()))}\n"
    return f"{text}\n{line}"


def open_note(note: str, key: NoteKey) -> str:
    """Return the text of a note that `key` has signed; signatures of other keys are ignored.

    Raises `RecordError` if the note is malformed or `key` has not signed it.
    """
    text, separator, tail = note.rpartition("\n\n")
    lines = tail.split("\n")
    if not separator or lines.pop() != "" or not lines:
        raise RecordError("not a signed note: it has no signature lines")
    text += "\n"
    for line in lines:
        match = re.fullmatch(r"— (\S+) (\S+)", line)
        signature = _decoded(match[2]) if match else b""
        if match is None or len(signature) < 5:
            raise RecordError("not a signed note: a signature line is malformed")
        if match[1] != key.name or signature[:4] != key.hash:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(key.public).verify(signature[4:], text.encode())
        except InvalidSignature:
            raise RecordError(f"the note's signature is not one of {key.name}") from None
        return text
    raise RecordError(f"the note is not signed by {key}")


@dataclass(frozen=True)
class LogCheckpoint:
    """Origin, size and Merkle root of a log at one moment."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        """The three lines that are signed."""
        return f"{self.origin}\n{self.size}\n{_base64(self.root)}\n"

    @classmethod
    def parse(cls, text: str) -> LogCheckpoint:
        """Parse `text`; ignore further lines (extensions). Raises `RecordError` if malformed."""
        lines = text.split("\n")
        if len(lines) >= 4 and lines[0] and re.fullmatch(r"0|[1-9][0-9]{0,18}", lines[1]):
            root = _decoded(lines[2])
            if len(root) == 32:
                return cls(lines[0], int(lines[1]), root)
        raise RecordError("not a log checkpoint: it must say origin, size and root")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: str) -> bytes:
    """Decode base64; return empty bytes if `text` is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
