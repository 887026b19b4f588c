"""Merkle trees against the Certificate Transparency vectors and RFC 6962 itself."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.record.log.merkle import (
    EMPTY,
    Frontier,
    consistency_proof,
    inclusion_proof,
    is_consistent,
    is_included,
    leaf_hash,
    node_hash,
    root_of,
    roots_at,
)

INPUTS = [
    bytes.fromhex(text)
    for text in (
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]  # fmt: skip
"""The leaves of the Certificate Transparency reference tests."""
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
LEAVES = [leaf_hash(data) for data in INPUTS]
sizes = st.integers(1, 40)


def tree(count: int) -> list[bytes]:
    return [leaf_hash(str(number).encode()) for number in range(count)]


@pytest.mark.parametrize("count", range(1, 9))
def test_roots_are_the_public_ones(count: int) -> None:
    assert root_of(LEAVES[:count]).hex() == ROOTS[count - 1]


def test_the_empty_tree_is_the_hash_of_nothing() -> None:
    assert root_of([]) == EMPTY == hashlib.sha256(b"").digest()


def test_the_paths_of_the_rfc() -> None:
    """RFC 6962, section 2.1.3: the tree of seven leaves d0 to d6."""
    d = tree(7)
    a, b, c, e, f = d[0], d[1], d[2], d[4], d[5]
    g, h, i, j = (node_hash(d[n], d[n + 1]) for n in (0, 2, 4, 0))
    k, left = node_hash(g, h), node_hash(i, d[6])
    assert inclusion_proof(d, 0) == [b, h, left]
    assert inclusion_proof(d, 3) == [c, g, left]
    assert inclusion_proof(d, 4) == [f, d[6], k]
    assert inclusion_proof(d, 6) == [i, k]
    assert consistency_proof(d, 3) == [c, d[3], g, left]
    assert consistency_proof(d, 4) == [left]
    assert consistency_proof(d, 6) == [i, d[6], k]
    assert (a, e, j) == (d[0], d[4], g)


@settings(deadline=None, max_examples=50)
@given(sizes)
def test_a_growing_tree_has_the_root_of_a_whole_one(count: int) -> None:
    leaves, grown = tree(count), Frontier()
    for number, leaf in enumerate(leaves, 1):
        grown.append(leaf)
        assert (grown.size, grown.root) == (number, _recursive(leaves[:number]))


def _recursive(leaves: list[bytes]) -> bytes:
    """The RFC's own definition."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1
    while middle * 2 < len(leaves):
        middle *= 2
    return node_hash(_recursive(leaves[:middle]), _recursive(leaves[middle:]))


@settings(deadline=None, max_examples=50)
@given(sizes.flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_every_leaf_has_a_proof_and_no_other_leaf_has_it(case: tuple[int, int]) -> None:
    count, index = case
    leaves = tree(count)
    proof, root = inclusion_proof(leaves, index), root_of(leaves)
    assert is_included(leaves[index], index, count, proof, root)
    assert not is_included(leaf_hash(b"other"), index, count, proof, root)
    assert not is_included(leaves[index], index, count, [*proof, root], root)
    assert not is_included(leaves[index], count, count, proof, root)
    if proof:
        assert not is_included(leaves[index], index, count, proof[:-1], root)
        assert not is_included(leaves[index], index, count, proof[::-1], root) or (
            proof == proof[::-1]
        )


def test_every_earlier_tree_is_a_beginning() -> None:
    """All m <= n up to 24."""
    for count in range(1, 25):
        leaves = tree(count)
        root = root_of(leaves)
        for earlier in range(1, count + 1):
            before = root_of(leaves[:earlier])
            proof = consistency_proof(leaves, earlier)
            assert is_consistent(earlier, before, count, root, proof)
            forked = root_of([*leaves[: earlier - 1], leaf_hash(b"forked")])
            assert not is_consistent(earlier, forked, count, root, proof)
            assert not is_consistent(earlier, before, count, leaf_hash(b"other"), proof)
            if proof:
                assert not is_consistent(earlier, before, count, root, proof[:-1])


@pytest.mark.parametrize("call", [lambda: inclusion_proof(LEAVES, 8),
                                  lambda: consistency_proof(LEAVES, 0),
                                  lambda: consistency_proof(LEAVES, 9)])  # fmt: skip
def test_there_is_no_proof_of_what_is_not_there(call: object) -> None:
    with pytest.raises(ValueError, match="a tree of 8 leaves has no"):
        call()  # type: ignore[operator]


@given(st.lists(st.binary(max_size=3), max_size=12), st.sets(st.integers(0, 14)))
def test_roots_of_beginnings(data: list[bytes], sizes: set[int]) -> None:
    leaves = [leaf_hash(each) for each in data]
    found = roots_at(iter(leaves), sizes)
    assert found == {size: root_of(leaves[:size]) for size in sizes if size <= len(leaves)}
