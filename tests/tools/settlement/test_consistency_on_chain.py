"""The contract accepts a consistency proof if and only if it is one (RFC 6962, RFC 9162)."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("web3")

from tests.support.chains import Chain
from tests.support.ledger_scene import LEAVES, LedgerScene, proof, root

from dilocox.record.log.merkle import leaf_hash
from dilocox.tools.settlement.ledger import Ledger

CHAINS = ["eth-tester", pytest.param("anvil", marks=pytest.mark.slow)]
pytestmark = pytest.mark.parametrize("chain", CHAINS, indirect=True)

PARTS = 20
OTHER = [*LEAVES[:7], leaf_hash(b"changed"), *LEAVES[8:]]
"""The same log with another statement 7."""


def forgeries(
    earlier: int, size: int, draw: random.Random
) -> list[tuple[int, bytes, int, bytes, list[bytes]]]:
    """Arguments of `isConsistent` with one thing that is not as it should be."""
    good, old, new = proof(earlier, size), root(earlier), root(size)
    strange = draw.randbytes(32)
    found = [
        (earlier, strange, size, new, good),
        (earlier, old, size, strange, good),
        (earlier, old, size, new, [*good, strange]),
        (earlier, old, size, new, [*good, new]),
    ]
    if good:
        place = draw.randrange(len(good))
        flipped = bytes([good[place][0] ^ 1]) + good[place][1:]
        found += [
            (earlier, old, size, new, [*good[:place], flipped, *good[place + 1 :]]),
            (earlier, old, size, new, good[:place] + good[place + 1 :]),
            (earlier, old, size, new, good[:-1]),
        ]
    if earlier != size:
        found.append((size, new, earlier, old, good))  # a log that shrinks
    if earlier > 7:
        found.append((earlier, root(earlier, OTHER), size, new, good))
        found.append((earlier, old, size, root(size, OTHER), proof(earlier, size, OTHER)))
    return found


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
def test_every_pair_of_sizes_to_64(chain: Chain, address: str, part: int) -> None:
    """All 2,080 pairs m <= n <= 64, each with one forgery, drawn; a part of them in `make test`."""
    ledger = Ledger(chain.web3, address)
    draw = random.Random(part)
    pairs = [(m, n) for n in range(1, 65) for m in range(1, n + 1)][part::PARTS]
    assert len(pairs) * PARTS == 64 * 65 // 2
    for m, n in pairs:
        assert ledger.call("isConsistent", m, root(m), n, root(n), proof(m, n)), (m, n)
        forged = draw.choice(forgeries(m, n, draw))
        assert not ledger.call("isConsistent", *forged), (m, n, forged)


def test_every_kind_of_forgery(chain: Chain, address: str) -> None:
    ledger = Ledger(chain.web3, address)
    draw = random.Random(0)
    for m, n in ((1, 1), (1, 2), (3, 5), (6, 8), (8, 8), (8, 21), (13, 63), (32, 64), (63, 64)):
        for forged in forgeries(m, n, draw):
            assert not ledger.call("isConsistent", *forged), (m, n, forged)
    assert not ledger.call("isConsistent", 0, root(0), 8, root(8), [])


def test_a_rewritten_log_cannot_be_anchored(scene: LedgerScene) -> None:
    scene.anchor(21)
    for size in (22, 40, 64):
        rewritten = (scene.run, size, size, root(size, OTHER))
        scene.refused("BadProof", "owner", "anchor", *rewritten, proof(21, size, OTHER))
        scene.refused("BadProof", "owner", "anchor", *rewritten, proof(21, size))
        scene.refused("BadProof", "owner", "anchor", *rewritten, [])
    for size in (20, 21):
        scene.refused("NotNewer", "owner", "anchor", scene.run, 99, size, root(size), [])
    scene.refused("NotNewer", "owner", "anchor", scene.run, 99, 0, root(0), [])
    scene.anchor(64)
    assert scene.state["root"] == root(64)


def test_the_first_anchor_takes_no_proof(scene: LedgerScene) -> None:
    scene.refused("BadProof", "owner", "anchor", scene.run, 1, 8, root(8), [root(8)])
    scene.anchor(8)


def test_roots_of_the_largest_sizes_need_no_more_steps_than_bits(
    chain: Chain, address: str
) -> None:
    """A proof with very many parts ends where the tree ends."""
    ledger = Ledger(chain.web3, address)
    size = 2**64 - 1
    assert not ledger.call("isConsistent", 2**63, root(1), size, root(2), [root(3)] * 500)
