"""Compression of request bodies, with text that requests of a run have in common.

In every round a rank sends the same few requests, with signed statements in base64. Their words are
the same each time; digests, signatures and figures differ. So a body alone compresses badly, and
with a dictionary of the common words well: a signed commitment to 0.4 times its size, a signed vote
to 0.3 times.

The format is zlib's (RFC 1950) with a preset dictionary, `common_text.txt`, which
`scripts/write_common_text.py` makes. The format names the dictionary by its checksum, so another
version's dictionary is noticed.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from importlib.resources import files

ENCODING = "dilocox-zlib"
"""Value of the header `Content-Encoding` of a compressed body."""
_LEVEL = 9


@lru_cache(maxsize=1)
def common_text() -> bytes:
    """Return the dictionary: the words of requests, the most frequent requests last."""
    return files("dilocox.coordinator.protocol").joinpath("common_text.txt").read_bytes()


def compressed(body: bytes) -> bytes:
    """Return `body` in the format of this module."""
    packer = zlib.compressobj(_LEVEL, zdict=common_text())
    return packer.compress(body) + packer.flush()


def decompressed(content: bytes, most: int) -> bytes:
    """Return the body that `compressed` made into `content`.

    No more than `most` + 1 bytes are unpacked.

    Raises:
        ValueError: `content` is damaged, cut short or followed by other bytes, has another
            dictionary, or holds a body of more than `most` bytes.
    """
    unpacker = zlib.decompressobj(zdict=common_text())
    try:
        body = unpacker.decompress(content, most + 1)
    except zlib.error:
        raise ValueError("not compressed with this version's dictionary") from None
    if len(body) > most:
        raise ValueError(f"above {most} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("cut short, or followed by other bytes")
    return body
