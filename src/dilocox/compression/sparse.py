"""What `topk` and `cocktail` share: K of every 4,096 values, the largest, and how they are packed.

Values are taken in chunks of 4,096, or, where K is below 64, of the next power of two of which 64
or more are kept, 65,536 at most: of fewer values the scales, and the last byte that is not full,
would be a large part. A last chunk may be shorter. Of c values, ceil(K * c / 4096) are kept. Each
chunk is a record of its own: its scales, then a stream of bits that starts with the lowest of the
first byte. Of k kept values, in the order of their places in the chunk, it has

- bit 0 of the k codes, then bit 1 of them, up to bit b - 1,
- bit 0 of the k indices, then bit 1 of them, up to bit l - 1,
- (c >> l) + k bits, of which number (index >> l) + i is 1 for the i-th index, i from 0,

and zeros up to a whole byte: b + l + 1 bits per value and (c >> l) per chunk. l is the number from
0 on for which l * k + (c >> l) is least, and the least such number. This is Elias and Fano's coding
of ascending numbers: 8.0 bits per index for K = 64, where no coding takes less than 7.4. All of it
is arithmetic on whole numbers, so it is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilocox.errors import ExchangeError

UNIT = 4096
"""Densities are so many of these."""
LARGEST_CHUNK = 65536
ENOUGH = 64
"""Kept values that a chunk should have."""

_APART, _SPREADS = 8, 4
"""A threshold is sought among every so many values, and so many standard deviations below where the
last kept value is to be expected among them."""
_PIECE = 64 * UNIT
"""Values that are worked on together: a MiB stays in the cache."""

Array = NDArray[Any]


def chunk_of(kept: int) -> int:
    """Values in a chunk that is not the last, if `kept` of 4,096 are."""
    size = UNIT
    while size < LARGEST_CHUNK and kept * size < ENOUGH * UNIT:
        size *= 2
    return size


def kept_of(width: int, kept: int) -> int:
    """How many of a chunk of `width` values are kept if it is `kept` of 4,096."""
    return -(-width * kept // UNIT)


def places_of(indices: Array, width: int) -> Array:
    """Positions, int64 [rows, k], of indices in rows of `width` of a flat array."""
    places: Array = indices + np.arange(0, len(indices) * width, width)[:, None]
    return places


def low_bits(k: int, width: int) -> int:
    """l: how many bits of each of k indices below `width` are sent as they are."""
    return min(range(width.bit_length()), key=lambda low: low * k + (width >> low))


def stream_bits(k: int, width: int, bits: int) -> int:
    """Bits of k kept values of a chunk of `width`, with codes of `bits` bits."""
    low = low_bits(k, width)
    return k * (bits + low + 1) + (width >> low)


def record_bytes(width: int, kept: int, head: int, bits: int) -> int:
    """Bytes of a chunk of `width` values: `head` of scales, then its stream of bits."""
    return head + -(-stream_bits(kept_of(width, kept), width, bits) // 8)


def payload_bytes(n: int, kept: int, head: int, bits: int) -> int:
    """Bytes of the records of n values."""
    chunk = chunk_of(kept)
    whole, rest = divmod(n, chunk)
    size = whole * record_bytes(chunk, kept, head, bits) if whole else 0
    return size + (record_bytes(rest, kept, head, bits) if rest else 0)


def chunks(n: int, kept: int, piece: int = _PIECE) -> Iterator[tuple[int, int, int]]:
    """(first value, number of chunks, their width) of the pieces in which n values are taken.

    `piece`: values that are worked on together, at least one chunk.
    """
    chunk = chunk_of(kept)
    whole, together = n // chunk, max(1, piece // chunk)
    for first in range(0, whole, together):
        yield first * chunk, min(together, whole - first), chunk
    if n % chunk:
        yield whole * chunk, 1, n % chunk


def strongest(magnitudes: Array, kept: int) -> Array:
    """Where in int32 [rows, width] the `kept` largest of each row are: int64 [rows * kept].

    Positions in the flat array, ascending; among equals the first are taken.
    """
    rows, width = magnitudes.shape
    found, least = _at_least(magnitudes, kept)
    if found.size == rows * kept:
        return found
    row = found // width
    equal = magnitudes.reshape(-1)[found] == least[row]
    spare = np.bincount(row, minlength=rows) - kept
    # Counted from the end of its row, an equal one is left out as long as there are too many.
    behind = np.cumsum(equal[::-1])[::-1]
    after = np.concatenate([behind, [0]])[np.searchsorted(row, np.arange(rows), side="right")]
    chosen: Array = found[~equal | (behind - after[row] > spare[row])]
    return chosen


def _at_least(magnitudes: Array, kept: int) -> tuple[Array, Array]:
    """Positions of all that are as large as the `kept`-th of their row, and that, [rows].

    Partitioning whole rows is most of what encoding costs. So every eighth value is looked at
    first: what is above a rank of these that is hardly ever too high is a small part of the row.
    """
    rows, width = magnitudes.shape
    sample = magnitudes[:, ::_APART]
    expected = kept / _APART
    rank = math.ceil(expected + _SPREADS * math.sqrt(expected + 1))
    if 2 * rank > sample.shape[1]:
        return _at_least_in_all(magnitudes, kept)
    bound = np.partition(sample, -rank, axis=1)[:, -rank]
    found: Array = np.flatnonzero(magnitudes >= bound[:, None])
    counts = np.diff(np.searchsorted(found, np.arange(0, (rows + 1) * width, width)))
    widest = int(counts.max())
    if counts.min() < kept or 2 * widest > width:
        return _at_least_in_all(magnitudes, kept)
    values = magnitudes.reshape(-1)[found]
    table = np.full((rows, widest), -1, dtype=np.int32)
    table[np.arange(widest) < counts[:, None]] = values
    least = np.partition(table, -kept, axis=1)[:, -kept]
    return found[values >= np.repeat(least, counts)], least


def _at_least_in_all(magnitudes: Array, kept: int) -> tuple[Array, Array]:
    least = np.partition(magnitudes, -kept, axis=1)[:, -kept]
    return np.flatnonzero(magnitudes >= least[:, None]), least


def indices_of(found: Array, rows: int, width: int) -> Array:
    """Indices in their rows, int64 [rows, k], of what `strongest` has found."""
    indices: Array = found.reshape(rows, -1) - np.arange(0, rows * width, width)[:, None]
    return indices


def pack(indices: Array, codes: Array, width: int, bits: int) -> Array:
    """The streams of [rows, k] ascending indices below `width` and codes of `bits` bits.

    Whole numbers of any dtype in, uint8 [rows, ceil(stream_bits / 8)] out.
    """
    rows, k = indices.shape
    low, size = low_bits(k, width), stream_bits(k, width, bits)
    stream = np.zeros((rows, size), dtype=np.uint8)
    entries = (codes & ((1 << bits) - 1) | (indices & ((1 << low) - 1)) << bits).astype(np.int16)
    for place in range(bits + low):
        stream[:, place * k : (place + 1) * k] = entries >> place & 1
    ones = (indices >> low) + np.arange((bits + low) * k, (bits + low + 1) * k)
    stream.reshape(-1)[places_of(ones, size)] = 1
    return np.packbits(stream, axis=1, bitorder="little")


def unpack(data: Array, k: int, width: int, bits: int, name: str) -> tuple[Array, Array]:
    """Indices, int64, and codes, int16, both [rows, k], that `pack` made `data` from.

    Raises `ExchangeError` for what `pack` does not make.
    """
    low, size = low_bits(k, width), stream_bits(k, width, bits)
    stream = np.unpackbits(data, axis=1, bitorder="little")
    if stream[:, size:].any():
        raise ExchangeError(f"{name} payload refused: the bits behind its last entry are not zero")
    entries = np.zeros((len(data), k), dtype=np.int16)
    for place in reversed(range(bits + low)):
        entries = entries << 1 | stream[:, place * k : (place + 1) * k]
    # As truth values, without gaps between rows, they are searched ten times as fast.
    high = np.ascontiguousarray(stream[:, (bits + low) * k : size]).view(np.bool_)
    if (np.count_nonzero(high, axis=1) != k).any():
        raise ExchangeError(
            f"{name} payload refused: a chunk does not have {k} indices; no site's encoder writes "
            "that"
        )
    ones = indices_of(np.flatnonzero(high), *high.shape)
    indices = (ones - np.arange(k)) << low | entries >> bits
    if not (indices[:, 1:] > indices[:, :-1]).all() or not (indices[:, -1] < width).all():
        raise ExchangeError(
            f"{name} payload refused: its indices do not ascend within chunks of {width}; no "
            "site's encoder writes that"
        )
    return indices, entries & ((1 << bits) - 1)
