"""The contract `RunLedger`: what it does for those who keep to its rules."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

pytest.importorskip("web3")

from tests.support.chains import ETHER
from tests.support.ledger_scene import MANIFEST, QUORUM, WINDOW, LedgerScene, root

from dilocox.tools.settlement.ledger import run_id

CHAINS = ["eth-tester", pytest.param("anvil", marks=pytest.mark.slow)]
pytestmark = pytest.mark.parametrize("chain", CHAINS, indirect=True)

GAS = {
    "register": 190_000,
    "stake": 75_000,
    "anchor": 80_000,
    "settle": 110_000,
    "claim": 125_000,
    "slashEquivocated": 125_000,
    "slashMismatch": 190_000,
}
"""Most gas of each function, with some room; `test_what_calls_cost` prints the figures."""


def test_a_run_has_what_it_was_registered_with(scene: LedgerScene) -> None:
    state = scene.state
    assert state["owner"] == scene.who("owner").address
    assert (state["window"], state["quorum"], state["minStake"]) == (WINDOW, QUORUM, scene.stake)
    assert (state["manifest"], state["pool"]) == (MANIFEST, scene.pool)
    assert state["auditorsRoot"] == scene.auditors_tree.root
    assert (state["size"], state["root"]) == (0, bytes(32))
    (event,) = scene.ledger("owner").events("Registered", scene.run)
    assert event["log"].hex() == scene.log
    scene.refused("AlreadyRegistered", "owner", "register", *scene.parameters)


def test_each_owner_has_an_id_of_its_own_for_a_log(scene: LedgerScene) -> None:
    """Nobody can take a run's id before its owner does."""
    scene.send("thief", "register", *scene.parameters, value=0)
    assert scene.state["owner"] == scene.who("owner").address
    other = run_id(scene.who("thief").address, scene.log)
    assert other != scene.run
    assert scene.call("runOf", other)[0] == scene.who("thief").address


def test_a_chain_leaves_the_limit_of_recursion(scene: LedgerScene) -> None:
    """Else deeply nested JSON of another test would end the process."""
    assert scene.state["size"] == 0
    assert sys.getrecursionlimit() == 1000


def test_a_stake_is_bound_until_two_windows_after_leaving(scene: LedgerScene) -> None:
    site = scene.who("site").address
    assert not scene.call("isStaked", scene.run, site)
    scene.refused("BadParameters", "site", "stake", scene.run, value=scene.stake - 1)
    scene.send("site", "stake", scene.run, value=scene.stake)
    assert scene.call("isStaked", scene.run, site)
    scene.refused("TooEarly", "site", "withdrawStake", scene.run)
    scene.send("site", "leaveRun", scene.run)
    assert not scene.call("isStaked", scene.run, site)
    scene.refused("NotStaked", "site", "leaveRun", scene.run)
    scene.chain.advance(2 * WINDOW - 60)
    scene.refused("TooEarly", "site", "withdrawStake", scene.run)
    scene.chain.advance(61)
    scene.send("site", "withdrawStake", scene.run)
    before = scene.chain.web3.eth.get_balance(site)
    scene.send("site", "withdraw")
    assert scene.chain.web3.eth.get_balance(site) > before + scene.stake - ETHER // 100
    scene.refused("NotStaked", "site", "withdrawStake", scene.run)
    scene.refused("NothingToPay", "site", "withdraw")


def test_staking_again_ends_the_leave(scene: LedgerScene) -> None:
    scene.send("site", "stake", scene.run, value=scene.stake)
    scene.send("site", "leaveRun", scene.run)
    scene.send("site", "stake", scene.run, value=1)
    assert scene.call("isStaked", scene.run, scene.who("site").address)
    scene.chain.advance(2 * WINDOW + 1)
    scene.refused("TooEarly", "site", "withdrawStake", scene.run)


def test_heads_of_one_log_are_anchored(scene: LedgerScene) -> None:
    for size in (1, 5, 8, 21, 64):
        scene.anchor(size)
    assert (scene.state["size"], scene.state["root"]) == (64, root(64))
    events = scene.ledger("owner").events("Anchored", scene.run)
    assert [each["size"] for each in events] == [1, 5, 8, 21, 64]
    assert all(each["root"] == root(each["size"]) for each in events)


def test_claims_are_paid_after_the_window_and_cumulative(scene: LedgerScene) -> None:
    site = scene.who("site").address
    scene.anchor(4)
    first = scene.settle({"site": 2 * ETHER, "late": ETHER}, wait=False)
    scene.refused("SettlementUnknown", "site", "claim", *scene.claim(first, "site", 2 * ETHER))
    scene.refused("SettlementPending", "owner", "settle", scene.run, 4, b"\7" * 32)
    scene.chain.advance(WINDOW + 1)
    scene.send("late", "claim", *scene.claim(first, "site", 2 * ETHER))  # by anybody
    assert scene.call("balanceOf", site) == 2 * ETHER
    scene.refused("NothingToPay", "site", "claim", *scene.claim(first, "site", 2 * ETHER))
    # A settlement whose claims were never made costs nothing: amounts are cumulative.
    scene.anchor(6)
    scene.settle({"site": 3 * ETHER, "late": 2 * ETHER})
    last = scene.settle({"site": 5 * ETHER, "late": 3 * ETHER})
    scene.send("site", "claim", *scene.claim(last, "site", 5 * ETHER))
    scene.send("late", "claim", *scene.claim(last, "late", 3 * ETHER))
    assert scene.call("balanceOf", site) == 5 * ETHER
    assert scene.call("balanceOf", scene.who("late").address) == 3 * ETHER
    assert scene.state["pool"] == scene.pool - 8 * ETHER


def test_an_empty_pool_pays_what_it_has_and_the_rest_later(
    scene_of: Callable[..., LedgerScene],
) -> None:
    scene = scene_of(pool=ETHER)
    scene.anchor(4)
    tree = scene.settle({"site": 3 * ETHER, "late": ETHER})
    scene.send("site", "claim", *scene.claim(tree, "site", 3 * ETHER))
    assert scene.call("claimed", scene.run, scene.who("site").address) == ETHER
    scene.refused("NothingToPay", "late", "claim", *scene.claim(tree, "late", ETHER))
    scene.send("owner", "fund", scene.run, value=5 * ETHER)
    scene.send("site", "claim", *scene.claim(tree, "site", 3 * ETHER))
    scene.send("late", "claim", *scene.claim(tree, "late", ETHER))
    assert scene.call("claimed", scene.run, scene.who("site").address) == 3 * ETHER
    assert scene.state["pool"] == 2 * ETHER


def test_a_quorum_of_auditors_vetoes_a_settlement(scene: LedgerScene) -> None:
    scene.anchor(4)
    tree = scene.settle({"thief": 9 * ETHER}, wait=False)
    votes = scene.votes(scene.auditors[1:4], "Veto", settlement=1, claimsRoot=tree.root)
    scene.send("late", "veto", scene.run, 1, votes)
    scene.chain.advance(WINDOW + 1)
    scene.refused("SettlementUnknown", "thief", "claim", *scene.claim(tree, "thief", 9 * ETHER))
    # The same claims again are another settlement, and the old votes say nothing about it.
    scene.settle({"thief": 9 * ETHER}, wait=False)
    scene.refused("SettlementUnknown", "late", "veto", scene.run, 1, votes)
    scene.refused("NotAuditor", "late", "veto", scene.run, 2, votes)


def test_two_roots_of_a_round_cost_the_stake(scene: LedgerScene) -> None:
    scene.send("lazy", "stake", scene.run, value=scene.stake + 7)
    scene.send("challenger", "slashEquivocated", scene.run, *scene.two_commits("lazy"))
    tenth = (scene.stake + 7) // 10
    assert scene.call("balanceOf", scene.who("challenger").address) == tenth
    assert scene.state["pool"] == scene.pool + scene.stake + 7 - tenth
    assert not scene.call("isStaked", scene.run, scene.who("lazy").address)
    assert not scene.state["forked"]


def test_two_heads_of_a_size_cost_the_owner_its_stake_and_the_run(scene: LedgerScene) -> None:
    scene.anchor(4)
    tree = scene.settle({"site": ETHER})
    scene.send("challenger", "slashForked", scene.run, *scene.two_heads("owner"))
    assert scene.state["forked"]
    assert scene.call("balanceOf", scene.who("challenger").address) >= scene.stake // 10
    scene.refused("RunEnded", "owner", "anchor", scene.run, 5, 5, root(5), [])
    scene.refused("RunEnded", "owner", "settle", scene.run, 4, b"\1" * 32)
    scene.refused("RunEnded", "owner", "stake", scene.run, value=scene.stake)
    scene.refused("RunEnded", "owner", "close", scene.run)
    # What was settled before is paid.
    scene.send("site", "claim", *scene.claim(tree, "site", ETHER))


def test_a_quorum_of_auditors_slashes_a_lazy_site(scene: LedgerScene) -> None:
    scene.send("lazy", "stake", scene.run, value=scene.stake)
    before = scene.call("balanceOf", scene.who("challenger").address)
    said = {"site": scene.who("lazy").address, "round": 2, "evidence": b"\5" * 32}
    said["challenger"] = scene.who("challenger").address
    votes = scene.votes(scene.auditors[:3], "Mismatch", **said)
    scene.send("late", "slashMismatch", scene.run, *said.values(), votes)
    after = scene.call("balanceOf", scene.who("challenger").address)
    assert after - before == scene.stake // 10
    assert scene.state["pool"] == scene.pool + scene.stake - scene.stake // 10


def test_a_closed_run_gives_its_pool_back_after_four_windows(scene: LedgerScene) -> None:
    scene.anchor(4)
    scene.send("owner", "close", scene.run)
    scene.refused("RunEnded", "site", "stake", scene.run, value=scene.stake)
    tree = scene.settle({"site": 4 * ETHER})
    scene.chain.advance(WINDOW)
    scene.refused("TooLate", "owner", "settle", scene.run, 4, b"\1" * 32)
    scene.refused("TooEarly", "owner", "reclaim", scene.run)
    scene.send("site", "claim", *scene.claim(tree, "site", 4 * ETHER))
    scene.chain.advance(2 * WINDOW)
    before = scene.call("balanceOf", scene.who("owner").address)
    scene.send("owner", "reclaim", scene.run)
    assert scene.call("balanceOf", scene.who("owner").address) - before == 6 * ETHER
    scene.refused("NothingToPay", "owner", "reclaim", scene.run)


def test_what_calls_cost(scene: LedgerScene, address: str) -> None:
    names = ["site", *(f"site {number}" for number in range(63))]
    for name in ("lazy", "site"):
        scene.send(name, "stake", scene.run, value=scene.stake)
    scene.anchor(37)
    scene.anchor(64)
    accounts = {name: ETHER // 100 * (number + 1) for number, name in enumerate(names)}
    tree = scene.settle(accounts)
    scene.send("site", "claim", *scene.claim(tree, "site", ETHER // 100))
    scene.send("challenger", "slashEquivocated", scene.run, *scene.two_commits("lazy"))
    said = {"site": scene.who("site").address, "round": 2, "evidence": b"\5" * 32}
    said["challenger"] = scene.who("challenger").address
    votes = scene.votes(scene.auditors[:3], "Mismatch", **said)
    scene.send("late", "slashMismatch", scene.run, *said.values(), votes)
    print({name: scene.gas[name] for name in GAS})
    assert {name: gas for name, gas in scene.gas.items() if gas > GAS.get(name, gas)} == {}
