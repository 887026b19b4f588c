"""The erasure code: Reed-Solomon over GF(2^8), systematic, from the package `zfec`.

Of n blocks of equal length the first k are the data, and any k of the n give the data back. Bytes
at the same offset of all blocks form one code word, so blocks are encoded slice by slice.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox.errors import RecordError
from dilocox.record.pieces.content import Content

MOST = 256
"""Largest number of pieces: GF(2^8) has no more elements."""
SLICE = 1 << 18
"""Bytes of each block that are encoded at once. A slice is small beside a training step, and keeps
the processor's caches warm."""
MISSING = (
    "the pieces of [availability] need the package zfec, which is not installed; install it with "
    "pip install 'dilocox[availability]'"
)


def is_installed() -> bool:
    """Return True if the package `zfec` is installed."""
    return importlib.util.find_spec("zfec") is not None


def _zfec() -> Any:
    if not is_installed():
        raise RecordError(MISSING)
    import zfec

    return zfec


def check_sizes(k: int, n: int) -> None:
    """Raise `RecordError` unless 1 <= k <= n <= 256."""
    if type(k) is not int or type(n) is not int or not 1 <= k <= n <= MOST:
        raise RecordError(f"{k} of {n} pieces: there is no such code; 1 to {MOST} pieces are")


@functools.lru_cache(maxsize=8)
def _encoder(k: int, n: int) -> Any:
    return _zfec().Encoder(k, n)


@functools.lru_cache(maxsize=8)
def _decoder(k: int, n: int) -> Any:
    return _zfec().Decoder(k, n)


def block_length(size: int, k: int) -> int:
    """Return the bytes of each block of `size` bytes of data: ceil(size / k)."""
    return -(-size // k)


def encoded(data: Content, k: int, n: int) -> Iterator[list[bytes | memoryview]]:
    """Encode `data`; yield slices of all n blocks, in order.

    Zeros fill up the last data block. Each item has n slices of equal length, at most `SLICE` bytes
    each; together the items are the blocks. Raises `RecordError` for sizes that have no code,
    without the package zfec, and for content that cannot be read.
    """
    check_sizes(k, n)
    length = block_length(data.size, k)
    for start in range(0, length, SLICE):
        end = min(start + SLICE, length)
        own = [_part(data, length * number + start, length * number + end) for number in range(k)]
        yield [*own, *(_encoder(k, n).encode(own, range(k, n)) if k < n else ())]


def _part(data: Content, start: int, end: int) -> bytes | memoryview:
    """Return the bytes from `start` to `end`; zeros stand for those beyond the data's end."""
    found = data.read(start, end)
    return found if len(found) == end - start else bytes(found).ljust(end - start, b"\0")


def decoded(blocks: Mapping[int, bytes | memoryview], k: int, n: int, size: int) -> bytes:
    """Return the data of `size` bytes from the first k of `blocks`.

    Args:
        blocks: At least k blocks by number, from 0, all of `block_length(size, k)` bytes.
        k: Number of blocks that the data is rebuilt from.
        n: Number of blocks that there were.
        size: Bytes of the data.

    Raises:
        RecordError: There is no such code, or the package zfec is missing.
    """
    check_sizes(k, n)
    numbers, length = _chosen(blocks, k), block_length(size, k)
    found = bytearray(k * length)
    for start in range(0, length, SLICE):
        end = min(start + SLICE, length)
        slices = [blocks[number][start:end] for number in numbers]
        for number, part in enumerate(_decoder(k, n).decode(slices, numbers)):
            found[number * length + start : number * length + end] = part
    return bytes(memoryview(found)[:size])


def _chosen(blocks: Mapping[int, bytes | memoryview], k: int) -> Sequence[int]:
    return sorted(blocks)[:k]
