"""Merkle trees as OpenZeppelin reads them."""

from __future__ import annotations

import pytest

pytest.importorskip("web3")

from eth_utils.crypto import keccak
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chains import account_of
from tests.support.ledger_scene import LedgerScene

from dilocox.tools.settlement.claims_tree import ClaimsTree, claim_leaf, levels, proof_of

RUN = b"\1" * 32


def processed(leaf: bytes, proof: list[bytes]) -> bytes:
    """OpenZeppelin's `MerkleProof.processProof`."""
    for part in proof:
        leaf = keccak(leaf + part) if leaf < part else keccak(part + leaf)
    return leaf


@given(st.sets(st.binary(min_size=32, max_size=32), min_size=1, max_size=70))
def test_every_leaf_is_proved_and_order_does_not_matter(leaves: set[bytes]) -> None:
    tree = levels(leaves)
    assert tree == levels(sorted(leaves, reverse=True))
    assert all(processed(each, proof_of(tree, each)) == tree[-1][0] for each in leaves)


def test_no_claims_have_no_tree() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ClaimsTree(RUN, {})


def test_the_contract_makes_the_same_leaf(scene: LedgerScene) -> None:
    who = account_of("site").address
    assert scene.call("claimLeaf", RUN, who, 12345) == claim_leaf(RUN, who, 12345)
