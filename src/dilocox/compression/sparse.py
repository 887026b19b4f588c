"""Selection and packing that `topk` and `cocktail` share: the K largest of every 4,096 values.

Values are divided into chunks of 4,096. If K is below 64, the chunk size is the next power of two
in which at least 64 values are kept, up to 65,536. In smaller chunks, the scales and the incomplete
last byte would take a large part of the record. The last chunk may be shorter. Of c values,
ceil(K * c / 4096) are kept.

Each chunk is one record: its scales, then a stream of bits that starts with the lowest bit of the
first byte. For k kept values, in the order of their places in the chunk, the stream holds

- bit 0 of the k codes, then bit 1 of the codes, up to bit b - 1,
- bit 0 of the k indices, then bit 1 of the indices, up to bit l - 1,
- (c >> l) + k bits, of which bit (index >> l) + i is 1 for the i-th index, i from 0,

then zeros up to a whole byte. A value takes b + l + 1 bits, and a chunk (c >> l) bits more. l is
the smallest number from 0 on for which l * k + (c >> l) is least. This is the Elias-Fano coding of
ascending numbers. For K = 64 an index takes 8.0 bits, and any coding needs at least 7.4. The
arithmetic uses whole numbers, so it gives the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilocox.errors import ExchangeError

UNIT = 4096
"""A density K means K kept values of every `UNIT` values."""
LARGEST_CHUNK = 65536
ENOUGH = 64
"""Least number of kept values for which a chunk is long enough."""

_APART, _SPREADS = 8, 4
"""The threshold for kept values is estimated from a sample of one in `_APART` values. It is set
`_SPREADS` standard deviations below the expected place of the last kept value in the sample."""
_PIECE = 64 * UNIT
"""Values that are processed together: 1 MiB, which stays in the cache."""

Array = NDArray[Any]


def chunk_of(kept: int) -> int:
    """Return the number of values in a chunk; the last chunk may be shorter.

    `kept` is K, the number of values kept of every 4,096.
    """
    size = UNIT
    while size < LARGEST_CHUNK and kept * size < ENOUGH * UNIT:
        size *= 2
    return size


def kept_of(width: int, kept: int) -> int:
    """Return how many values of a chunk of `width` values are kept; `kept` is K."""
    return -(-width * kept // UNIT)


def places_of(indices: Array, width: int) -> Array:
    """Convert indices within rows of `width` to positions in the flat array, int64 [rows, k]."""
    places: Array = indices + np.arange(0, len(indices) * width, width)[:, None]
    return places


def low_bits(k: int, width: int) -> int:
    """Return l: the number of low bits that are sent as they are, for k indices below `width`."""
    return min(range(width.bit_length()), key=lambda low: low * k + (width >> low))


def stream_bits(k: int, width: int, bits: int) -> int:
    """Return the bits of the stream of k kept values of `width`, with codes of `bits` bits."""
    low = low_bits(k, width)
    return k * (bits + low + 1) + (width >> low)


def record_bytes(width: int, kept: int, head: int, bits: int) -> int:
    """Return the bytes of a chunk of `width` values: `head` bytes of scales, then its stream."""
    return head + -(-stream_bits(kept_of(width, kept), width, bits) // 8)


def payload_bytes(n: int, kept: int, head: int, bits: int) -> int:
    """Return the bytes of the records of n values; see `record_bytes` for `head` and `bits`."""
    chunk = chunk_of(kept)
    whole, rest = divmod(n, chunk)
    size = whole * record_bytes(chunk, kept, head, bits) if whole else 0
    return size + (record_bytes(rest, kept, head, bits) if rest else 0)


def chunks(n: int, kept: int, piece: int = _PIECE) -> Iterator[tuple[int, int, int]]:
    """Yield (first value, number of chunks, width of each chunk) of each piece of n values.

    `piece`: number of values that are processed together; at least one chunk is.
    """
    chunk = chunk_of(kept)
    whole, together = n // chunk, max(1, piece // chunk)
    for first in range(0, whole, together):
        yield first * chunk, min(together, whole - first), chunk
    if n % chunk:
        yield whole * chunk, 1, n % chunk


def strongest(magnitudes: Array, kept: int) -> Array:
    """Return the positions of the `kept` largest values of each row of int32 [rows, width].

    The result is int64 [rows * kept]: ascending positions in the flat array. Among equal values the
    first ones are taken.
    """
    rows, width = magnitudes.shape
    found, least = _at_least(magnitudes, kept)
    if found.size == rows * kept:
        return found
    row = found // width
    equal = magnitudes.reshape(-1)[found] == least[row]
    spare = np.bincount(row, minlength=rows) - kept
    # If too many values equal the smallest kept value, the last ones of the row are left out.
    behind = np.cumsum(equal[::-1])[::-1]
    after = np.concatenate([behind, [0]])[np.searchsorted(row, np.arange(rows), side="right")]
    chosen: Array = found[~equal | (behind - after[row] > spare[row])]
    return chosen


def _at_least(magnitudes: Array, kept: int) -> tuple[Array, Array]:
    """Return the positions of all values as large as the `kept`-th largest of their row, and these
    `kept`-th largest values, [rows].

    Partitioning whole rows would take most of the time of encoding. So a threshold is estimated
    first, from every eighth value; the estimate is hardly ever too high. Only the small part of the
    row above the threshold is then partitioned.
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
    """Convert the result of `strongest` to indices within rows, int64 [rows, k]."""
    indices: Array = found.reshape(rows, -1) - np.arange(0, rows * width, width)[:, None]
    return indices


def pack(indices: Array, codes: Array, width: int, bits: int) -> Array:
    """Pack ascending indices below `width`, and codes of `bits` bits, into one stream per row.

    `indices` and `codes` are whole numbers [rows, k] of any dtype. Returns uint8
    [rows, ceil(stream_bits / 8)].
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
    """Undo `pack`: return indices, int64 [rows, k], and codes, int16 [rows, k], of `data`.

    Raises `ExchangeError`, which names the codec `name`, for streams that `pack` never makes.
    """
    low, size = low_bits(k, width), stream_bits(k, width, bits)
    stream = np.unpackbits(data, axis=1, bitorder="little")
    if stream[:, size:].any():
        raise ExchangeError(f"{name} payload refused: the bits behind its last entry are not zero")
    entries = np.zeros((len(data), k), dtype=np.int16)
    for place in reversed(range(bits + low)):
        entries = entries << 1 | stream[:, place * k : (place + 1) * k]
    # As contiguous booleans, the bits are searched ten times as fast.
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
