"""Merkle trees of RFC 6962, section 2.1: roots, inclusion proofs, consistency proofs.

A leaf is hashed as SHA-256(0x00 ‖ data), an inner node as SHA-256(0x01 ‖ left ‖ right). A tree of n
leaves splits at the largest power of two below n. All hashes are 32 bytes. All functions are pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

EMPTY = hashlib.sha256().digest()
"""Root of the empty tree."""


def leaf_hash(data: bytes) -> bytes:
    """Hash of a leaf."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """Append-only tree. It stores only the roots of its perfect subtrees, largest first."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        """Build the tree over `leaves`, which are hashes from `leaf_hash`."""
        self.size = 0
        self._roots: list[bytes] = []
        for leaf in leaves:
            self.append(leaf)

    def append(self, leaf: bytes) -> None:
        """Append the hash of a leaf."""
        carry, size = leaf, self.size
        while size & 1:
            carry = node_hash(self._roots.pop(), carry)
            size >>= 1
        self._roots.append(carry)
        self.size += 1

    @property
    def roots(self) -> list[bytes]:
        """Roots of the perfect subtrees, largest first; with `size` they define the tree."""
        return list(self._roots)

    @classmethod
    def of(cls, size: int, roots: Sequence[bytes]) -> Frontier:
        """Rebuild the tree of `size` leaves with these `roots`.

        Raises `ValueError` if the number of roots does not match `size`.
        """
        if size < 0 or size.bit_count() != len(roots) or any(len(each) != 32 for each in roots):
            raise ValueError(f"a tree of {size} leaves has no {len(roots)} subtrees")
        tree = cls()
        tree.size, tree._roots = size, list(roots)
        return tree

    @property
    def root(self) -> bytes:
        """Root of the current tree."""
        if not self._roots:
            return EMPTY
        result = self._roots[-1]
        for left in reversed(self._roots[:-1]):
            result = node_hash(left, result)
        return result


def root_of(leaves: Sequence[bytes]) -> bytes:
    """Return the root of the tree over these leaf hashes."""
    return Frontier(leaves).root


def roots_at(leaves: Iterable[bytes], sizes: Collection[int]) -> dict[int, bytes]:
    """Return the roots of the trees over the first n leaves, for each n of `sizes`.

    Sizes beyond the number of leaves are left out. `leaves`: leaf hashes, which are read once, and
    no further than the largest size.
    """
    tree, wanted, last = Frontier(), set(sizes), max(sizes, default=-1)
    found = {0: EMPTY} if 0 in wanted else {}
    if last > 0:
        for leaf in leaves:
            tree.append(leaf)
            if tree.size in wanted:
                found[tree.size] = tree.root
            if tree.size == last:
                break
    return found


def _split(size: int) -> int:
    """Return the largest power of two below `size`; `size` must be at least 2."""
    return 1 << (size - 1).bit_length() - 1


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the inclusion proof of leaf `index` in the tree over `leaves`, from the leaf upwards.

    Raises `ValueError` if `index` is out of range.
    """
    if not 0 <= index < len(leaves):
        raise ValueError(f"a tree of {len(leaves)} leaves has no leaf {index}")
    if len(leaves) == 1:
        return []
    middle = _split(len(leaves))
    if index < middle:
        return [*inclusion_proof(leaves[:middle], index), root_of(leaves[middle:])]
    return [*inclusion_proof(leaves[middle:], index - middle), root_of(leaves[:middle])]


def is_included(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Return True if `proof` proves `leaf` at `index` in the tree of `size` leaves with `root`.

    Uses the algorithm of RFC 9162, section 2.1.3.2, which has the same trees.
    """
    if not 0 <= index < size:
        return False
    number, last, result = index, size - 1, leaf
    for part in proof:
        if last == 0:
            return False
        if number & 1 or number == last:
            result = node_hash(part, result)
            while not number & 1 and number:
                number, last = number >> 1, last >> 1
        else:
            result = node_hash(result, part)
        number, last = number >> 1, last >> 1
    return last == 0 and result == root


def consistency_proof(leaves: Sequence[bytes], earlier: int) -> list[bytes]:
    """Return the proof that the tree over the first `earlier` leaves is a prefix of the whole tree.

    Raises `ValueError` unless 0 < `earlier` <= number of leaves.
    """
    if not 0 < earlier <= len(leaves):
        raise ValueError(f"a tree of {len(leaves)} leaves has no earlier one of {earlier}")
    return _subproof(leaves, earlier, True)


def _subproof(leaves: Sequence[bytes], earlier: int, whole: bool) -> list[bytes]:
    if earlier == len(leaves):
        return [] if whole else [root_of(leaves)]
    middle = _split(len(leaves))
    if earlier <= middle:
        return [*_subproof(leaves[:middle], earlier, whole), root_of(leaves[middle:])]
    return [*_subproof(leaves[middle:], earlier - middle, False), root_of(leaves[:middle])]


def is_consistent(
    earlier: int, earlier_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> bool:
    """Return True if `proof` shows that the tree of `size` leaves continues that of `earlier`.

    Uses the algorithm of RFC 9162, section 2.1.4.2.
    """
    if not 0 < earlier <= size:
        return False
    if earlier == size:
        return not proof and earlier_root == root
    parts = list(proof)
    if earlier & (earlier - 1) == 0:
        parts.insert(0, earlier_root)
    if not parts:
        return False
    number, last = earlier - 1, size - 1
    while number & 1:
        number, last = number >> 1, last >> 1
    old = new = parts[0]
    for part in parts[1:]:
        if last == 0:
            return False
        if number & 1 or number == last:
            old, new = node_hash(part, old), node_hash(part, new)
            while not number & 1 and number:
                number, last = number >> 1, last >> 1
        else:
            new = node_hash(new, part)
        number, last = number >> 1, last >> 1
    return last == 0 and old == earlier_root and new == root
