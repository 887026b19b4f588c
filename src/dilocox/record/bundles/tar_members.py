"""Tar files of bundles: plain files with names of a few known forms, sorted, without metadata.

A reader parses one header of 512 bytes at a time, and takes nothing but plain files with these
names. No header can make the reader write elsewhere, or keep more than one piece in memory.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator

from dilocox.errors import RecordError

BLOCK = 512
CHUNK = 1 << 20
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}"
STATEMENTS = "record/statements-{:06d}.jsonl"
"""Name of the file with a bundle's statements, by the bundle's number."""
ALLOWED = re.compile(
    r"record/(statements-[0-9]{6}\.jsonl|checkpoint|log\.pub)"
    r"|record/store/sha256/[0-9a-f]{2}/[0-9a-f]{62}(\.bf16)?"
    rf"|(record/audits|record/cosigned|model)/{_NAME}"
    r"|(run\.toml|metrics\.jsonl|summary\.json|ledger\.json|data/croissant\.json)"
)
"""Names of files in a bundle."""
Read = Callable[[int], bytes]
"""Returns as many bytes as asked for, or fewer at the end."""


class MalformedError(RecordError):
    """A bundle does not have the form or the bytes of its statement."""


def header(name: str, size: int) -> bytes:
    """Return the tar header of a file, 512 bytes.

    Raises `RecordError` for a name that bundles do not have.
    """
    if not ALLOWED.fullmatch(name):
        raise RecordError(f"{name}: bundles hold no file of this name; rename or remove it")
    about = tarfile.TarInfo(name)
    about.size, about.mode = size, 0o644
    return about.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    """Return the zero bytes that fill a file's last block."""
    return bytes(-size % BLOCK)


END = bytes(2 * BLOCK)
"""End of a tar file."""


def members(read: Read, size: int) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """Iterate over the files of a tar file as (name, bytes, content in pieces).

    A content that is not read to its end is skipped. `size`: bytes of the tar file. Raises
    `MalformedError` for anything but plain files with allowed names that are not larger than the
    tar file.
    """
    left = size
    while True:
        block = _exactly(read, BLOCK)
        left -= BLOCK
        if block == bytes(BLOCK):
            if any(any(piece) for piece in _pieces(read, left)):
                raise MalformedError("has bytes after its end")
            return
        name, length = _opened(block)
        stored = length + len(padding(length))
        if stored > left:
            raise MalformedError(f"{name}: is larger than its bundle")
        content = _pieces(read, length)
        yield name, length, content
        for _ in content:
            pass
        _exactly(read, len(padding(length)))
        left -= stored


def _opened(block: bytes) -> tuple[str, int]:
    """Parse a header; return (name, bytes)."""
    try:
        about = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError, ValueError):
        raise MalformedError("is not a tar file") from None
    if about.type != tarfile.REGTYPE or not ALLOWED.fullmatch(about.name) or about.size < 0:
        raise MalformedError(f"{about.name[:100]!r} is not a file that a bundle may hold")
    return about.name, about.size


def _pieces(read: Read, length: int) -> Iterator[bytes]:
    while length:
        piece = _exactly(read, min(CHUNK, length))
        length -= len(piece)
        yield piece


def _exactly(read: Read, length: int) -> bytes:
    data = read(length)
    if len(data) != length:
        raise MalformedError("ends too early")
    return data
