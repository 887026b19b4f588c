from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data import SequenceSpace, TokenFiles, held_out
from dilocox.data.sequences import permute
from dilocox.errors import DataError

SETTINGS = settings(derandomize=True, deadline=None, max_examples=80)
LENGTH = 16
PINNED_10 = [9, 6, 1, 4, 2, 3, 7, 0, 5, 8]
PINNED_100_000 = "3a7343fc04d7d990aa9201ad1a01a835b64f697efe2a7ca895658d63c6b39ac7"


def order(size: int, key: bytes) -> np.ndarray:
    return permute(np.arange(size, dtype=np.uint64), size, key)


@SETTINGS
@given(size=st.integers(1, 5000), key=st.binary(max_size=32))
def test_permute_is_a_bijection(size: int, key: bytes) -> None:
    assert np.array_equal(np.sort(order(size, key)), np.arange(size))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 65536, 65537])
def test_permute_is_a_bijection_at_small_sizes_and_powers(size: int) -> None:
    assert np.array_equal(np.sort(order(size, b"key")), np.arange(size))


@SETTINGS
@given(size=st.integers(1, 2**40), data=st.data())
def test_permute_does_not_depend_on_what_is_asked_with_it(size: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = permute(np.array(asked, dtype=np.uint64), size, b"k")
    alone = [int(permute(np.array([one], dtype=np.uint64), size, b"k")[0]) for one in asked]
    assert together.tolist() == alone
    assert max(alone) < size
    assert len(set(alone)) == len(set(asked))


def plain_permute(position: int, size: int, key: bytes) -> int:
    """`permute` of one position, written again with Python's integers."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = position >> half, position % 2**half
        for number in range(8):
            digest = hashlib.sha256(key + bytes([number])).digest()
            mixed = right ^ int.from_bytes(digest[:8], "little")
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (mixed ^ mixed >> 31) % 2**half
        position = left << half | right
        if position < size:
            return position


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 2**33 + 7])
def test_permute_equals_plain_integers(size: int) -> None:
    asked = sorted({0, 1 % size, size // 2, size - 1})
    got = permute(np.array(asked, dtype=np.uint64), size, b"abc").tolist()
    assert got == [plain_permute(position, size, b"abc") for position in asked]


def test_permute_is_pinned() -> None:
    """Another order would be another run: a change here needs a new format."""
    assert order(10, b"").tolist() == PINNED_10
    digest = hashlib.sha256(order(100_000, b"dilocox").astype("<u8").tobytes()).hexdigest()
    assert digest == PINNED_100_000


def test_permute_mixes() -> None:
    """Neighbours land far apart, and no position keeps its value more often than by chance."""
    size = 10_000
    result = order(size, b"mix").astype(np.int64)
    assert abs(np.corrcoef(np.arange(size), result)[0, 1]) < 0.05
    steps = np.abs(np.diff(result))
    assert abs(steps.mean() / (size / 3) - 1) < 0.05
    assert np.count_nonzero(result == np.arange(size)) < 10


def test_every_epoch_visits_every_sequence_once_in_its_own_order(files: TokenFiles) -> None:
    space = SequenceSpace(files, seed=1, sequence_length=LENGTH)
    size = space.sequences_per_epoch
    epochs = [space.positions(epoch * size, size) for epoch in range(3)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(size))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_order_depends_on_seed_length_split_and_digest(files: TokenFiles, copy: TokenFiles) -> None:
    def first(files: TokenFiles, seed: int = 0, length: int = LENGTH) -> list[int]:
        return SequenceSpace(files, seed=seed, sequence_length=length).positions(0, 50).tolist()

    assert first(files) == first(copy)
    copy.digest = "0" * 64
    assert len({str(order) for order in (first(files), first(files, seed=1), first(copy))}) == 3
    assert first(files, length=LENGTH - 1) != first(files)


def test_read_is_what_the_split_holds(files: TokenFiles) -> None:
    space = SequenceSpace(files, seed=0, sequence_length=LENGTH)
    raw = np.fromfile(files.folder / "train-00000.bin", dtype="<u2").astype(np.int64)
    rows = space.read(3, 40)
    assert rows.dtype == np.int64
    assert rows.shape == (40, LENGTH + 1)
    for row, position in zip(rows, space.positions(3, 40), strict=True):
        offset = position * LENGTH
        assert np.array_equal(row, raw[offset : offset + LENGTH + 1])


@SETTINGS
@given(start=st.integers(0, 2000), count=st.integers(0, 40))
def test_read_equals_single_reads(files: TokenFiles, start: int, count: int) -> None:
    space = SequenceSpace(files, seed=5, sequence_length=LENGTH)
    single = [space.read(number, 1) for number in range(start, start + count)]
    expected = np.concatenate(single) if single else np.empty((0, LENGTH + 1), dtype=np.int64)
    assert np.array_equal(space.read(start, count), expected)


@SETTINGS
@given(cuts=st.lists(st.integers(0, 300), min_size=2, max_size=8, unique=True))
def test_disjoint_ranges_of_an_epoch_hold_disjoint_sequences(
    files: TokenFiles, cuts: list[int]
) -> None:
    space = SequenceSpace(files, seed=2, sequence_length=LENGTH)
    cuts = sorted(min(cut, space.sequences_per_epoch) for cut in cuts)
    seen: set[int] = set()
    for start, end in pairwise(cuts):
        part = set(space.positions(start, end - start).tolist())
        assert len(part) == end - start
        assert not part & seen
        seen |= part


def test_range_may_span_epochs(files: TokenFiles) -> None:
    space = SequenceSpace(files, seed=0, sequence_length=LENGTH)
    size = space.sequences_per_epoch
    rows = space.read(size - 2, 2 * size + 4)
    assert np.array_equal(rows[2 : 2 + size], space.read(size, size))


def test_far_numbers(files: TokenFiles) -> None:
    space = SequenceSpace(files, seed=0, sequence_length=LENGTH)
    assert space.read(10**15, 3).shape == (3, LENGTH + 1)


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, -1)])
def test_range_must_be_an_interval(files: TokenFiles, start: int, count: int) -> None:
    with pytest.raises(ValueError, match="not an interval"):
        SequenceSpace(files, seed=0, sequence_length=LENGTH).read(start, count)


def test_held_out_is_spread_and_bounded(files: TokenFiles) -> None:
    raw = np.fromfile(files.folder / "validation-00000.bin", dtype="<u2").astype(np.int64)
    everything = (len(raw) - 1) // LENGTH
    all_rows = held_out(files, LENGTH, 10**6)
    assert len(all_rows) == everything
    for number, row in enumerate(all_rows):
        assert np.array_equal(row, raw[number * LENGTH : number * LENGTH + LENGTH + 1])
    few = held_out(files, LENGTH, 5)
    assert np.array_equal(few, all_rows[[number * everything // 5 for number in range(5)]])
    assert np.array_equal(few, held_out(files, LENGTH, 5))


def test_too_long_a_sequence_is_refused(files: TokenFiles) -> None:
    with pytest.raises(DataError, match=r"train split has [\d,]+ tokens, sequence_length 1000000"):
        SequenceSpace(files, seed=0, sequence_length=10**6)
    with pytest.raises(DataError, match=r"validation split .*raise data\.validation_fraction"):
        held_out(files, files.token_count("validation"), 4)


def test_longest_possible_sequence_is_the_split(files: TokenFiles) -> None:
    tokens = files.token_count("validation")
    rows = held_out(files, tokens - 1, 4)
    assert rows.shape == (1, tokens)
