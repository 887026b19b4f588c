"""What `topk` and `cocktail` share: the largest of every 4,096 values, and how indices are packed.

Values are taken in chunks of 4,096; a last chunk may be shorter. Of c values, ceil(K * c / 4096)
are kept. Each chunk is a record of its own: its scales, then one entry of 12 + b bits per kept
value (index in the chunk, value), ascending, in a stream of bits that starts with the lowest of the
first byte. All of this is arithmetic on whole numbers, so it is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilocox.errors import ExchangeError

CHUNK = 4096
INDEX_BITS = 12
SMALLEST_NORMAL = 2.0**-126

_PIECE = 64
"""Chunks that are worked on together: a MiB of values stays in the cache."""

Array = NDArray[Any]


def kept_of(width: int, kept: int) -> int:
    """How many of a chunk of `width` values are kept if it is `kept` of 4,096."""
    return -(-width * kept // CHUNK)


def record_bytes(width: int, kept: int, head: int, bits: int) -> int:
    """Bytes of a chunk of `width` values: `head` of scales, then entries of `bits` bits."""
    return head + -(-kept_of(width, kept) * bits // 8)


def payload_bytes(n: int, kept: int, head: int, bits: int) -> int:
    """Bytes of the records of n values."""
    whole, rest = divmod(n, CHUNK)
    size = whole * record_bytes(CHUNK, kept, head, bits)
    return size + (record_bytes(rest, kept, head, bits) if rest else 0)


def chunks(n: int) -> Iterator[tuple[int, int, int]]:
    """(first value, number of chunks, their width) of the pieces in which n values are taken."""
    whole = n // CHUNK
    for first in range(0, whole, _PIECE):
        yield first * CHUNK, min(_PIECE, whole - first), CHUNK
    if n % CHUNK:
        yield whole * CHUNK, 1, n % CHUNK


def strongest(magnitudes: Array, kept: int) -> Array:
    """Where in int32 [rows, width] the `kept` largest of each row are: int64 [rows * kept].

    Positions in the flat array, ascending; among equals the first are taken.
    """
    rows, width = magnitudes.shape
    place = width - kept
    least = np.partition(magnitudes, place, axis=1)[:, place : place + 1]
    found: Array = np.flatnonzero(magnitudes >= least)
    if found.size == rows * kept:
        return found
    row = found // width
    equal = magnitudes.reshape(-1)[found] == least[row, 0]
    spare = np.bincount(row, minlength=rows) - kept
    # Counted from the end of its row, an equal one is left out as long as there are too many.
    behind = np.cumsum(equal[::-1])[::-1]
    after = np.concatenate([behind, [0]])[np.searchsorted(row, np.arange(rows), side="right")]
    chosen: Array = found[~equal | (behind - after[row] > spare[row])]
    return chosen


def indices_of(found: Array, rows: int, width: int) -> Array:
    """Indices in their rows, int64 [rows, k], of what `strongest` has found."""
    indices: Array = found.reshape(rows, -1) - np.arange(0, rows * width, width)[:, None]
    return indices


def pack(entries: Array, bits: int) -> Array:
    """int64 [rows, k] in 0 to 2^bits - 1, `bits` 14 or 16, to uint8 [rows, ceil(k * bits / 8)]."""
    rows, k = entries.shape
    if k % 4:
        entries = np.pad(entries, [(0, 0), (0, -k % 4)])
    words = entries[:, ::4].copy()
    for place in (1, 2, 3):
        words |= entries[:, place::4] << (place * bits)
    data: Array = words.view(np.uint8).reshape(rows, -1, 8)[:, :, : bits // 2].reshape(rows, -1)
    return data[:, : -(-k * bits // 8)]


def unpack(data: Array, k: int, bits: int, name: str) -> Array:
    """What `pack` made `data` from, int64 [rows, k].

    Raises `ExchangeError` if the bits behind the last entry are not zero.
    """
    rows, size = data.shape
    count = -(-k // 4)
    data = np.pad(data, [(0, 0), (0, count * (bits // 2) - size)])
    words = np.zeros((rows, count, 8), dtype=np.uint8)
    words[:, :, : bits // 2] = data.reshape(rows, count, -1)
    joined = words.view(np.int64)[:, :, 0]
    entries = np.empty((rows, count * 4), dtype=np.int64)
    for place in range(4):
        entries[:, place::4] = joined >> (place * bits) & ((1 << bits) - 1)
    if entries[:, k:].any():
        raise ExchangeError(f"{name} payload refused: the bits behind its last entry are not zero")
    return entries[:, :k]


def check_indices(indices: Array, width: int, name: str) -> None:
    """Raise `ExchangeError` unless each row ascends strictly and stays below `width`."""
    if not (indices[:, 1:] > indices[:, :-1]).all() or not (indices[:, -1] < width).all():
        raise ExchangeError(
            f"{name} payload refused: its indices do not ascend within chunks of {width}; no "
            "site's encoder writes that"
        )
