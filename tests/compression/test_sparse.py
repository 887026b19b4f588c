"""What the sparse codecs share: the largest values of a row, and packed entries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@given(seed=st.integers(0, 1000), rows=st.integers(1, 4), k=st.integers(1, 41))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_entries_are_packed_as_a_stream_of_bits(seed: int, rows: int, k: int) -> None:
    for bits in (14, 16):
        entries = np.random.default_rng(seed).integers(0, 1 << bits, (rows, k))
        data = sparse.pack(entries, bits)
        assert data.shape == (rows, -(-k * bits // 8))
        for row, packed in zip(entries, data, strict=True):
            stream = sum(int(entry) << (place * bits) for place, entry in enumerate(row))
            assert int.from_bytes(packed.tobytes(), "little") == stream
        assert np.array_equal(sparse.unpack(data, k, bits, "x"), entries)


def test_bits_behind_the_last_entry_must_be_zero() -> None:
    data = sparse.pack(np.array([[5]]), 14)
    data[0, 1] |= 64
    with pytest.raises(ExchangeError, match="bits behind its last entry"):
        sparse.unpack(data, 1, 14, "x")


@pytest.mark.parametrize("bad", [[[3, 2]], [[2, 2]], [[1, 5]], [[0, 1], [0, 9]]])
def test_indices_must_ascend_and_be_in_range(bad: list[list[int]]) -> None:
    sparse.check_indices(np.array([[0, 4], [1, 2]]), 5, "x")
    with pytest.raises(ExchangeError, match="do not ascend within chunks of 5"):
        sparse.check_indices(np.array(bad), 5, "x")


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 4097, 33 * 4096 + 128, 64 * 4096])
def test_chunks_cover_all_values(n: int) -> None:
    taken = list(sparse.chunks(n))
    assert [start for start, _, _ in taken] == [
        sum(rows * width for _, rows, width in taken[:number]) for number in range(len(taken))
    ]
    assert sum(rows * width for _, rows, width in taken) == n
    assert all(width == 4096 for _, _, width in taken[:-1])
    sizes = [4096] * (n // 4096) + ([n % 4096] if n % 4096 else [])
    kept = [math.ceil(77 * size / 4096) for size in sizes]
    expected = sum(4 + math.ceil(14 * each / 8) for each in kept)
    assert sparse.payload_bytes(n, 77, 4, 14) == expected
