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

_PIECE = 32
"""Chunks that are worked on together: half a MiB of values stays in the cache."""
_GROUPS = (16, 8, 4, 2)

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
    """Indices, int64 [rows, kept] ascending, of the largest of each row of int32 [rows, width].

    Among equals the first are taken.
    """
    rows, width = magnitudes.shape
    # With `kept` groups whose largest are at least `bound`, so are `kept` values of the row: few
    # values are left to choose from, and a small array is searched instead of a large one.
    group = next((g for g in _GROUPS if width % g == 0 and kept * 4 * g <= width), 1)
    peaks = magnitudes.reshape(rows, group, -1).max(1) if group > 1 else magnitudes
    found = np.flatnonzero(magnitudes >= _nth(peaks, kept))
    if found.size > rows * kept:
        found = _cut(found, magnitudes.reshape(-1)[found], rows, width, kept)
    indices: Array = found.reshape(rows, kept) % width
    return indices


def pack(entries: Array, bits: int) -> Array:
    """uint64 [rows, k] below 2^bits, `bits` 14 or 16, to uint8 [rows, ceil(k * bits / 8)]."""
    rows, k = entries.shape
    fours = np.zeros((rows, -(-k // 4) * 4), dtype=np.uint64)
    fours[:, :k] = entries
    fours = fours.reshape(rows, -1, 4) << (np.arange(4, dtype=np.uint64) * np.uint64(bits))
    words = np.bitwise_or.reduce(fours, axis=2).astype("<u8")
    data: Array = words.view(np.uint8).reshape(rows, -1, 8)[:, :, : bits // 2].reshape(rows, -1)
    return data[:, : -(-k * bits // 8)]


def unpack(data: Array, k: int, bits: int, name: str) -> Array:
    """What `pack` made `data` from, uint64 [rows, k].

    Raises `ExchangeError` if the bits behind the last entry are not zero.
    """
    rows, size = data.shape
    count = -(-k // 4)
    filled = np.zeros((rows, count * (bits // 2)), dtype=np.uint8)
    filled[:, :size] = data
    words = np.zeros((rows, count, 8), dtype=np.uint8)
    words[:, :, : bits // 2] = filled.reshape(rows, count, -1)
    fours = words.view("<u8") >> (np.arange(4, dtype=np.uint64) * np.uint64(bits))
    entries: Array = (fours & np.uint64((1 << bits) - 1)).reshape(rows, -1)
    if entries[:, k:].any():
        raise ExchangeError(f"{name} payload refused: the bits behind its last entry are not zero")
    return entries[:, :k]


def check_indices(indices: Array, width: int, name: str) -> None:
    """Raise `ExchangeError` unless each row ascends strictly and stays below `width`."""
    if not (np.diff(indices.astype(np.int64)) > 0).all() or not (indices < width).all():
        raise ExchangeError(
            f"{name} payload refused: its indices do not ascend within chunks of {width}; no "
            "site's encoder writes that"
        )


def _nth(rows: Array, n: int) -> Array:
    """The n-th largest of each row, [rows, 1]."""
    place = rows.shape[1] - n
    return np.partition(rows, place, axis=1)[:, place : place + 1]


def _cut(found: Array, values: Array, rows: int, width: int, kept: int) -> Array:
    """Of positions `found` in [rows, width], ascending, those of the `kept` largest of each row."""
    row = found // width
    counts = np.bincount(row, minlength=rows)
    starts = np.cumsum(counts) - counts
    table = np.full((rows, counts.max()), -1, dtype=values.dtype)
    table[row, np.arange(found.size) - starts[row]] = values
    least = _nth(table, kept)[row, 0]
    above, equal = values > least, values == least
    wanted = kept - np.bincount(row[above], minlength=rows)
    before = np.concatenate([[0], np.cumsum(equal)])
    rank = before[1:] - before[starts][row]
    chosen: Array = found[above | (equal & (rank <= wanted[row]))]
    return chosen
