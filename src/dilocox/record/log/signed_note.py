"""Signed notes, log checkpoints and cosignatures, in the formats that C2SP specifies.

A note (c2sp.org/signed-note) is a text that ends in a newline, then an empty line, then signature
lines `— NAME BASE64(key hash ‖ Ed25519 signature)`. A checkpoint (c2sp.org/tlog-checkpoint) is a
note of three lines: the log's origin, its size in decimal, its root in base64. A cosignature
(c2sp.org/tlog-cosignature, Ed25519) is a signature line of a witness under a checkpoint: it signs
the checkpoint and a time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import ClassVar, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from dilocox.errors import RecordError
from dilocox.utils.plain_text import plain

_ED25519, _COSIGNATURE = b"\x01", b"\x04"


@dataclass(frozen=True)
class NoteKey:
    """A public key that signs notes under a name."""

    KIND: ClassVar[bytes] = _ED25519
    """Byte that stands for the algorithm in the key's published form."""
    WHAT: ClassVar[str] = "log key"
    name: str
    public: bytes
    """32 bytes, Ed25519."""

    @property
    def hash(self) -> bytes:
        """The 4 bytes that identify this key in a signature line."""
        return hashlib.sha256(self.name.encode() + b"\n" + self.KIND + self.public).digest()[:4]

    def __str__(self) -> str:
        """Return the published form of the key: `NAME+HASH+BASE64`."""
        return f"{self.name}+{self.hash.hex()}+{_base64(self.KIND + self.public)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the form of `str`. Raises `RecordError` if the text is not such a key."""
        match = re.fullmatch(r"([^\s+]+)\+([0-9a-f]{8})\+(\S+)", text.strip())
        if match is not None and plain(match[1]) != match[1]:
            raise RecordError(f"{cls.WHAT} {match[1][:80]!r}: its name has control characters")
        data = _decoded(match[3]) if match else b""
        if match is not None and len(data) == 33 and data[:1] == cls.KIND:
            key = cls(match[1], data[1:])
            if key.hash.hex() == match[2]:
                return key
        if len(data) == 33 and data[:1] in (_ED25519, _COSIGNATURE) and data[:1] != cls.KIND:
            other = WitnessKey if data[:1] == _COSIGNATURE else NoteKey
            raise RecordError(f"{text.strip()[:80]!r} is a {other.WHAT}, not a {cls.WHAT}")
        raise RecordError(
            f"{text.strip()[:80]!r} is not a {cls.WHAT}: copy it whole, NAME+HASH+KEY"
        )


@dataclass(frozen=True)
class WitnessKey(NoteKey):
    """A public key of a witness, which cosigns checkpoints of logs under a name."""

    KIND: ClassVar[bytes] = _COSIGNATURE
    WHAT: ClassVar[str] = "key of a witness"


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
    text, signatures = split_note(note)
    for name, signature in signatures:
        if name != key.name or signature[:4] != key.hash:
            continue
        if not _is_signed(key, signature[4:], text.encode()):
            raise RecordError(f"the note's signature is not one of {key.name}")
        return text
    raise RecordError(f"the note is not signed by {key}")


def split_note(note: str) -> tuple[str, list[tuple[str, bytes]]]:
    """Return the text of a note and its signatures, which are not checked.

    A signature is (name, key hash ‖ signature). Raises `RecordError` if the note is malformed.
    """
    if any(each < " " and each != "\n" for each in note):
        raise RecordError("not a signed note: it has control characters")
    text, separator, tail = note.rpartition("\n\n")
    lines = tail.split("\n")
    if not separator or lines.pop() != "" or not lines:
        raise RecordError("not a signed note: it has no signature lines")
    found = []
    for line in lines:
        match = re.fullmatch(r"— (\S+) (\S+)", line)
        signature = _decoded(match[2]) if match else b""
        if match is None or len(signature) < 5:
            raise RecordError("not a signed note: a signature line is malformed")
        found.append((match[1], signature))
    return text + "\n", found


def signed_only(note: str, *keys: NoteKey) -> str:
    """Return a note with the signature lines of `keys` alone, which are not checked.

    Lines of others may be anything. Raises `RecordError` if the note is malformed.
    """
    text, signatures = split_note(note)
    own = {(key.name, key.hash) for key in keys}
    lines = [f"— {name} {_base64(signature)}\n"
             for name, signature in signatures if (name, signature[:4]) in own]  # fmt: skip
    return f"{text}\n{''.join(lines)}"


def cosign(text: str, name: str, key: Ed25519PrivateKey, time: int) -> str:
    """Return the signature line of a witness under the checkpoint `text`, with its newline.

    `time`: Unix time in whole seconds. Raises `ValueError` for a text without a final newline.
    """
    if not text.endswith("\n"):
        raise ValueError("the text of a note ends in a newline")
    public = WitnessKey(name, key.public_key().public_bytes_raw())
    signature = key.sign(_cosigned(text, time))
    return f"— {name} {_base64(public.hash + time.to_bytes(8, 'big') + signature)}\n"


def cosigned_at(note: str, key: WitnessKey) -> int | None:
    """Return the latest Unix time at which a witness has cosigned a note; None if it never has.

    Raises `RecordError` if the note is malformed, or if a line in the name of this key is not its
    cosignature.
    """
    text, signatures = split_note(note)
    latest: int | None = None
    for name, signature in signatures:
        if name != key.name or signature[:4] != key.hash:
            continue
        time = int.from_bytes(signature[4:12], "big")
        whole = len(signature) == 4 + 8 + 64 and time < 1 << 63
        if not whole or not _is_signed(key, signature[12:], _cosigned(text, time)):
            raise RecordError(f"a cosignature is not one of witness {key.name}")
        latest = time if latest is None else max(latest, time)
    return latest


def _cosigned(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()


def _is_signed(key: NoteKey, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature, message)
    except InvalidSignature:
        return False
    return True


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
