"""Roots of 0G Storage are those of its own code, however the bytes arrive."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("sha3")

from dilocox.errors import RecordError
from dilocox.record.bundles.zerog_root import (
    CHUNK,
    SEGMENT,
    FileTree,
    RootBuilder,
    keccak_256,
    padded,
    tree_of,
)

ROOTS = {
    1: "d824f453688dd43b32a73fde006eb8bec9f94441674e975dba8202d531ff07fa",
    257: "18c232da805061bcbed3a78992f058624af48d56cd0a1118cfded2d151ec7e64",
    1000: "f27bf3d4140a35fa2dea9c11fd970452806fd6c9c3862f35e391153b8914ae49",
    262145: "a21fec16d7fe5eaf5b1da71a8fc7a953eed1b078be8ff9bfc81ee73b9718ffe9",
    1000000: "d74b21b851ba18c47da190f8d2ed2bde01747da719449fec0257fa34d550109e",
    3000000: "06e74e660c0362965622eb6f2097fed929bc3b5cf5d1d4a62af4c7adfb1c9259",
}
"""Roots of the bytes (7 * i + n) % 256, for i from 0 to n - 1, by n; from 0G Storage's own code."""


@pytest.mark.parametrize("size", ROOTS)
def test_known_roots(size: int) -> None:
    data = bytes((7 * i + size) % 256 for i in range(size))
    assert tree_of(data).root.hex() == ROOTS[size]


def keccak(data: bytes) -> bytes:
    found: bytes = keccak_256()(data).digest()
    return found


def test_it_is_keccak_and_not_the_sha3_of_fips_202() -> None:
    empty = "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    assert keccak(b"").hex() == empty


def slow_root(leaves: list[bytes]) -> bytes:
    """The root by RFC 6962's definition, with other hashes."""
    if len(leaves) == 1:
        return leaves[0]
    cut = 1 << ((len(leaves) - 1).bit_length() - 1)
    return keccak(slow_root(leaves[:cut]) + slow_root(leaves[cut:]))


def parts_of(tree: FileTree) -> bytes:
    """The root by the subtrees that the contract is told."""
    root = tree.nodes[-1].root
    for node in reversed(tree.nodes[:-1]):
        root = keccak(node.root + root)
    return root


def proved(tree: FileTree, segment: int) -> bytes:
    """The root by the proof of a segment."""
    hashes, lefts = tree.proof(segment)
    if not lefts:
        return hashes[0]
    assert len(hashes) == len(lefts) + 2
    assert hashes[0] == tree.segments[segment]
    now = hashes[0]
    for left, other in zip(lefts, hashes[1:-1], strict=True):
        now = keccak(now + other) if left else keccak(other + now)
    return now


@settings(deadline=None, max_examples=25)
@given(
    size=st.one_of(st.integers(1, 6 * SEGMENT), st.integers(1, 40 * CHUNK)),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
@example(size=SEGMENT, cuts=[])
@example(size=SEGMENT + 1, cuts=[0.5])
@example(size=1408 * CHUNK, cuts=[0.7])
@example(size=17 * SEGMENT, cuts=[])
@example(size=17 * SEGMENT + 1, cuts=[0.1])
def test_a_tree_by_its_definition(size: int, cuts: list[float]) -> None:
    data = random.Random(size).randbytes(size)
    builder = RootBuilder()
    places = [0, *sorted(int(cut * size) for cut in cuts), size]
    for begin, end in itertools.pairwise(places):
        builder.update(data[begin:end])
    tree = builder.finish()
    chunks = padded(-(-size // CHUNK))
    whole = data.ljust(chunks * CHUNK, b"\0")
    leaves = [keccak(whole[at : at + CHUNK]) for at in range(0, len(whole), CHUNK)]
    assert tree.root == slow_root(leaves)
    assert (tree.size, tree.sectors, tree.count) == (size, chunks, -(-size // SEGMENT))
    assert parts_of(tree) == tree.root
    assert [node.height for node in tree.nodes] == [
        height for height in reversed(range(40)) if chunks >> height & 1
    ]
    assert {proved(tree, segment) for segment in range(len(tree.segments))} == {tree.root}


@pytest.fixture(scope="module")
def padded_by_wheel() -> Callable[[int], int]:
    pytest.importorskip("zg_storage")
    from tests.support.zerog_network import reference

    found: Callable[[int], int] = reference().compute_padded_chunks
    return found


def test_files_are_filled_as_by_the_wheel(padded_by_wheel: Callable[[int], int]) -> None:
    for chunks in (*range(1, 5000), 2**20 - 1, 2**20, 2**20 + 1, 2**24 + 12345):
        assert padded(chunks) == padded_by_wheel(chunks)


def test_an_empty_file_has_no_root() -> None:
    with pytest.raises(RecordError, match="no empty file"):
        RootBuilder().finish()
