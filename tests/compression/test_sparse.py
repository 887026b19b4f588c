"""What the sparse codecs share: the largest values of a row, and packed entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dilocox.compression import sparse
from dilocox.errors import ExchangeError


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 3, 128, 640, 4096]),
    share=st.integers(1, 4096),
    distinct=st.sampled_from([1, 2, 40, 2**31 - 1]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_largest_are_found(seed: int, rows: int, width: int, share: int, distinct: int) -> None:
    """Against a stable sort, with few distinct values, too: then there are ties everywhere."""
    kept = sparse.kept_of(width, share)
    magnitudes = np.random.default_rng(seed).integers(0, distinct, (rows, width), dtype=np.int32)
    before = magnitudes.copy()
    found = sparse.strongest(magnitudes, kept)
    order = np.argsort(-magnitudes.astype(np.int64), axis=1, kind="stable")[:, :kept]
    expected = np.sort(order, axis=1) + np.arange(rows)[:, None] * width
    assert np.array_equal(found, expected.reshape(-1))
    assert np.array_equal(magnitudes, before)


WIDTHS = st.sampled_from([1, 3, 13, 128, 640, 1000, 3968, 4096])


def drawn(seed: int, rows: int, k: int, width: int, bits: int) -> tuple[Any, Any]:
    """Ascending indices below `width`, and codes."""
    generator = np.random.default_rng(seed)
    indices = np.sort(np.argsort(generator.random((rows, width)), axis=1)[:, :k], axis=1)
    return indices, generator.integers(0, 1 << bits, (rows, k))


@given(width=WIDTHS, share=st.integers(1, 4096))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_indices_are_cut_where_the_stream_is_shortest(width: int, share: int) -> None:
    k = sparse.kept_of(width, share)
    sizes = [k * (low + 3) + (width >> low) for low in range(20)]
    assert sparse.stream_bits(k, width, 2) == min(sizes)
    assert sparse.low_bits(k, width) == sizes.index(min(sizes))


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 4),
    width=WIDTHS,
    share=st.integers(1, 4096),
    bits=st.sampled_from([2, 4]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_stream_of_bits(seed: int, rows: int, width: int, share: int, bits: int) -> None:
    k = sparse.kept_of(width, share)
    indices, codes = drawn(seed, rows, k, width, bits)
    data = sparse.pack(indices, codes, width, bits)
    low = sparse.low_bits(k, width)
    size = k * (bits + low + 1) + (width >> low)
    assert data.shape == (rows, -(-size // 8))
    for row, of_row, packed in zip(indices.tolist(), codes.tolist(), data, strict=True):
        stream = [code >> place & 1 for place in range(bits) for code in of_row]
        stream += [index >> place & 1 for place in range(low) for index in row]
        high = [0] * (k + (width >> low))
        for number, index in enumerate(row):
            high[(index >> low) + number] = 1
        expected = sum(bit << place for place, bit in enumerate(stream + high))
        assert int.from_bytes(packed.tobytes(), "little") == expected
    found, of_found = sparse.unpack(data, k, width, bits, "x")
    assert np.array_equal(found, indices)
    assert np.array_equal(of_found, codes)


@given(seed=st.integers(0, 10_000), width=WIDTHS, share=st.integers(1, 600))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_stream_is_refused_or_the_only_one_of_its_content(
    seed: int, width: int, share: int
) -> None:
    """One or two bits of a good stream are turned."""
    k = sparse.kept_of(width, share)
    data = sparse.pack(*drawn(seed, 2, k, width, 2), width, 2)
    before = data.copy()
    for place in np.random.default_rng(seed + 1).choice(data.size * 8, 1 + seed % 2, replace=False):
        data.reshape(-1)[place // 8] ^= 1 << place % 8
    assert not np.array_equal(data, before)
    reason: str | None = None
    try:
        indices, codes = sparse.unpack(data, k, width, 2, "x")
    except ExchangeError as error:
        reason = str(error)
    if reason is not None:
        assert reason.startswith("x payload refused: ")
        return
    assert (np.diff(indices, axis=1) > 0).all()
    assert indices.min() >= 0
    assert indices.max() < width
    assert np.array_equal(sparse.pack(indices, codes, width, 2), data)


def by_hand(low: list[int], ones: list[int], more: int = 0) -> NDArray[Any]:
    """A stream for three of 13 (codes 0; l = 1): low bits, ones among 9 high bits, 1 of padding."""
    assert sparse.low_bits(3, 13) == 1
    bits = sum(bit << 6 + place for place, bit in enumerate(low)) + more * (1 << 18)
    bits += sum(1 << 9 + place for place in ones)
    return np.frombuffer(bits.to_bytes(3, "little"), dtype=np.uint8).reshape(1, 3)


def test_streams_that_nobody_writes_are_refused() -> None:
    good = by_hand([1, 0, 0], [0, 3, 8])
    indices, codes = sparse.unpack(good, 3, 13, 2, "x")
    assert indices.tolist() == [[1, 4, 12]]
    assert not codes.any()
    for wrong, reason in (
        (by_hand([1, 0, 0], [0, 3, 8], more=1), "bits behind its last entry are not zero"),
        (by_hand([1, 0, 0], [0, 3]), "does not have 3 indices"),
        (by_hand([1, 0, 0], [0, 3, 4, 8]), "does not have 3 indices"),
        (by_hand([1, 0, 1], [0, 3, 8]), "do not ascend within chunks of 13"),  # 13 itself
        (by_hand([1, 0, 0], [0, 1, 8]), "do not ascend within chunks of 13"),  # 1, 0, 12
        (by_hand([1, 1, 0], [0, 1, 8]), "do not ascend within chunks of 13"),  # 1, 1, 12
    ):
        with pytest.raises(ExchangeError, match=f"x payload refused: .*{reason}"):
            sparse.unpack(wrong, 3, 13, 2, "x")
        # In one of several chunks, too.
        with pytest.raises(ExchangeError, match=f"x payload refused: .*{reason}"):
            sparse.unpack(np.concatenate([good, wrong]), 3, 13, 2, "x")
    # All chunks together have the right number.
    few, many = by_hand([0, 0, 0], [0, 3]), by_hand([0, 0, 0], [0, 3, 4, 8])
    with pytest.raises(ExchangeError, match="does not have 3 indices"):
        sparse.unpack(np.concatenate([few, many]), 3, 13, 2, "x")


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 4097, 33 * 4096 + 128, 64 * 4096])
def test_chunks_cover_all_values(n: int) -> None:
    taken = list(sparse.chunks(n, 77))
    assert [start for start, _, _ in taken] == [
        sum(rows * width for _, rows, width in taken[:number]) for number in range(len(taken))
    ]
    assert sum(rows * width for _, rows, width in taken) == n
    assert all(width == 4096 for _, _, width in taken[:-1])
    sizes = [4096] * (n // 4096) + ([n % 4096] if n % 4096 else [])
    kept = [math.ceil(77 * size / 4096) for size in sizes]
    streams = [
        min(each * (low + 3) + (size >> low) for low in range(13))
        for each, size in zip(kept, sizes, strict=True)
    ]
    assert sparse.payload_bytes(n, 77, 4, 2) == sum(4 + math.ceil(bits / 8) for bits in streams)


@pytest.mark.parametrize(
    ("kept", "chunk"),
    [
        (1, 65536),
        (7, 65536),
        (8, 32768),
        (15, 32768),
        (16, 16384),
        (32, 8192),
        (63, 8192),
        (64, 4096),
        (2048, 4096),
    ],
)
def test_chunks_are_larger_where_few_values_are_kept(kept: int, chunk: int) -> None:
    assert sparse.chunk_of(kept) == chunk
    n = 5 * 65536 + 100
    taken = list(sparse.chunks(n, kept))
    assert sum(rows * width for _, rows, width in taken) == n
    assert {width for _, _, width in taken[:-1]} == {chunk}
    assert max(rows * width for _, rows, width in taken) <= 64 * 4096
