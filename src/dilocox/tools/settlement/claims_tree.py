"""Merkle trees of `RunLedger`: who may claim how much, and who is an auditor.

Both are trees as OpenZeppelin's `MerkleProof` reads them. A leaf is keccak256(keccak256(ABI
encoding)), and an inner node is keccak256 over its two children in ascending order. Leaves are
sorted, so a set has one root. A node without a neighbour goes up as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eth_abi.abi import encode
from eth_utils.crypto import keccak


def claim_leaf(run: bytes, account: str, cumulative: int) -> bytes:
    """Return the leaf of an account that may claim `cumulative` wei since the run began."""
    return _leaf(("bytes32", "address", "uint256"), (run, account, cumulative))


def auditor_leaf(account: str) -> bytes:
    """Return the leaf of an auditor's account."""
    return _leaf(("address",), (account,))


class ClaimsTree:
    """The claims of one settlement."""

    def __init__(self, run: bytes, amounts: Mapping[str, int]) -> None:
        """`amounts`: wei by account, cumulative. Raises `ValueError` if there are none."""
        self._leaves = {who: claim_leaf(run, who, amount) for who, amount in amounts.items()}
        self._levels = levels(self._leaves.values())

    @property
    def root(self) -> bytes:
        """The claims root."""
        return self._levels[-1][0]

    def proof(self, account: str) -> list[bytes]:
        """Return the proof for an account. Raises `KeyError` if it has no claim."""
        return proof_of(self._levels, self._leaves[account])


class AuditorsTree:
    """The auditors of a run."""

    def __init__(self, accounts: Iterable[str]) -> None:
        """`accounts`: addresses. Raises `ValueError` if there are none."""
        self._levels = levels(map(auditor_leaf, accounts))

    @property
    def root(self) -> bytes:
        """The auditors root."""
        return self._levels[-1][0]

    def proof(self, account: str) -> list[bytes]:
        """Return the proof that an account is an auditor. Raises `ValueError` if it is none."""
        return proof_of(self._levels, auditor_leaf(account))


def levels(leaves: Iterable[bytes]) -> list[list[bytes]]:
    """Return the nodes of a tree by level, leaves first. Raises `ValueError` without leaves."""
    level = sorted(set(leaves))
    if not level:
        raise ValueError("a tree has at least one leaf")
    found = [level]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [_node(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        found.append(level)
    return found


def proof_of(tree: Sequence[Sequence[bytes]], leaf: bytes) -> list[bytes]:
    """Return the neighbours of a leaf's way to the root. Raises `ValueError` for a strange leaf."""
    index, proof = list(tree[0]).index(leaf), []
    for level in tree[:-1]:
        if index ^ 1 < len(level):
            proof.append(level[index ^ 1])
        index >>= 1
    return proof


def _node(left: bytes, right: bytes) -> bytes:
    return bytes(keccak(min(left, right) + max(left, right)))


def _leaf(types: Sequence[str], values: Sequence[object]) -> bytes:
    return bytes(keccak(keccak(encode(types, values))))
