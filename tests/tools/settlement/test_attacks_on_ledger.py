"""What an attacker tries on `RunLedger`: each is refused, or gains nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("web3")

from tests.support.chains import ETHER, Chain
from tests.support.ledger_scene import WINDOW, LedgerScene, deployed, root
from web3 import Web3

from dilocox.errors import SettlementError
from dilocox.tools.settlement.claims_tree import ClaimsTree
from dilocox.tools.settlement.messages import Domain

CHAINS = ["eth-tester", pytest.param("anvil", marks=pytest.mark.slow)]
pytestmark = pytest.mark.parametrize("chain", CHAINS, indirect=True)

ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
"""Order of secp256k1."""


def twin(signature: bytes) -> bytes:
    """The other signature that the same key could have made (malleability)."""
    r, s, v = signature[:32], int.from_bytes(signature[32:64]), signature[64]
    return r + (ORDER - s).to_bytes(32) + bytes([55 - v])


def test_nobody_but_the_owner_anchors_settles_closes_or_reclaims(scene: LedgerScene) -> None:
    scene.send("thief", "stake", scene.run, value=scene.stake)
    scene.anchor(4)
    scene.refused("NotOwner", "thief", "anchor", scene.run, 5, 5, root(5), [])
    scene.refused("NotOwner", "thief", "settle", scene.run, 4, b"\1" * 32)
    scene.refused("NotOwner", "thief", "close", scene.run)
    scene.refused("NotOwner", "thief", "reclaim", scene.run)


def test_an_owner_without_a_stake_cannot_anchor(scene: LedgerScene) -> None:
    scene.anchor(4)
    scene.send("owner", "leaveRun", scene.run)
    scene.refused("NotStaked", "owner", "anchor", scene.run, 5, 5, root(5), [])
    scene.chain.advance(2 * WINDOW + 1)
    scene.send("owner", "withdrawStake", scene.run)
    scene.refused("NotStaked", "owner", "anchor", scene.run, 5, 5, root(5), [])
    # Its fork ends the run all the same.
    scene.send("challenger", "slashForked", scene.run, *scene.two_heads("owner"))
    assert scene.state["forked"]


def test_an_offence_while_a_site_leaves_costs_the_stake(scene: LedgerScene) -> None:
    scene.send("lazy", "stake", scene.run, value=scene.stake)
    scene.send("lazy", "leaveRun", scene.run)
    scene.send("challenger", "slashEquivocated", scene.run, *scene.two_commits("lazy"))
    scene.chain.advance(2 * WINDOW + 1)
    scene.refused("NotStaked", "lazy", "withdrawStake", scene.run)


def test_a_claim_of_somebody_else_or_of_more_is_refused(scene: LedgerScene) -> None:
    scene.anchor(4)
    tree = scene.settle({"site": 2 * ETHER, "late": ETHER, "lazy": 3 * ETHER})
    run, who, amount, proof = scene.claim(tree, "site", 2 * ETHER)
    thief = scene.who("thief").address
    scene.refused("BadProof", "thief", "claim", run, thief, amount, proof)
    scene.refused("BadProof", "thief", "claim", run, who, amount + 1, proof)
    scene.refused("BadProof", "thief", "claim", run, who, amount, proof[:-1])
    scene.refused("BadProof", "thief", "claim", run, who, amount, [*proof, tree.root])


def test_a_settlement_of_a_run_pays_nothing_of_another(
    scene_of: Callable[..., LedgerScene],
) -> None:
    ours, theirs = scene_of("ours"), scene_of("theirs")
    ours.anchor(4)
    theirs.anchor(4)
    tree = ours.settle({"thief": 5 * ETHER, "site": ETHER})
    theirs.settle({"late": 1})
    _, who, amount, proof = ours.claim(tree, "thief", 5 * ETHER)
    theirs.refused("BadProof", "thief", "claim", theirs.run, who, amount, proof)
    # The same root settled there pays nobody, because leaves name the run.
    theirs.send("owner", "settle", theirs.run, 4, tree.root)
    theirs.chain.advance(WINDOW + 1)
    theirs.refused("BadProof", "thief", "claim", theirs.run, who, amount, proof)
    assert theirs.state["pool"] == theirs.pool


def test_a_pool_is_not_paid_from_other_pools_or_stakes(
    scene_of: Callable[..., LedgerScene],
) -> None:
    rich, poor = scene_of("rich"), scene_of("poor", pool=ETHER)
    poor.anchor(4)
    tree = poor.settle({"thief": 100 * ETHER})
    before = poor.call("balanceOf", poor.who("thief").address)
    poor.send("thief", "claim", *poor.claim(tree, "thief", 100 * ETHER))
    assert poor.call("balanceOf", poor.who("thief").address) - before == ETHER
    poor.refused("NothingToPay", "thief", "claim", *poor.claim(tree, "thief", 100 * ETHER))
    assert rich.state["pool"] == rich.pool
    assert poor.call("stakes", poor.run, poor.who("owner").address)[0] == poor.stake


def test_a_smaller_settlement_pays_nothing_and_takes_nothing_back(scene: LedgerScene) -> None:
    scene.anchor(4)
    tree = scene.settle({"site": 2 * ETHER})
    scene.send("site", "claim", *scene.claim(tree, "site", 2 * ETHER))
    tree = scene.settle({"site": ETHER})
    scene.refused("NothingToPay", "site", "claim", *scene.claim(tree, "site", ETHER))
    tree = scene.settle({"site": 2 * ETHER + 1})
    scene.send("site", "claim", *scene.claim(tree, "site", 2 * ETHER + 1))
    assert scene.call("claimed", scene.run, scene.who("site").address) == 2 * ETHER + 1


def test_settling_needs_the_newest_head(scene: LedgerScene) -> None:
    scene.refused("NotNewer", "owner", "settle", scene.run, 0, b"\1" * 32)
    scene.anchor(4)
    scene.anchor(6)
    scene.refused("NotNewer", "owner", "settle", scene.run, 4, b"\1" * 32)
    scene.refused("BadParameters", "owner", "settle", scene.run, 6, bytes(32))


@pytest.mark.parametrize("case", ["few", "twice", "twin", "strange", "disordered", "other"])
def test_a_veto_needs_a_quorum_of_different_auditors(scene: LedgerScene, case: str) -> None:
    scene.anchor(4)
    tree = scene.settle({"thief": ETHER}, wait=False)
    said = {"settlement": 1, "claimsRoot": tree.root}
    one, two, three = scene.votes(scene.auditors[:3], "Veto", **said)
    strange = (scene.signed("thief", "Veto", **said), one[1])
    other = scene.votes(scene.auditors[:3], "Veto", settlement=1, claimsRoot=b"\1" * 32)
    votes = {
        "few": [one, two],
        "twice": [one, two, two],
        "twin": [one, two, (twin(two[0]), two[1])],
        "strange": [one, two, strange],
        "disordered": [two, one, three],
        "other": other,
    }[case]
    with pytest.raises(SettlementError):
        scene.send("thief", "veto", scene.run, 1, votes)
    scene.send("thief", "veto", scene.run, 1, [one, two, three])


def test_a_veto_after_the_window_is_too_late(scene: LedgerScene) -> None:
    scene.anchor(4)
    tree = scene.settle({"site": ETHER})
    votes = scene.votes(scene.auditors[:3], "Veto", settlement=1, claimsRoot=tree.root)
    scene.refused("TooLate", "thief", "veto", scene.run, 1, votes)
    scene.send("site", "claim", *scene.claim(tree, "site", ETHER))
    scene.refused("SettlementUnknown", "thief", "veto", scene.run, 1, votes)


def test_an_offence_is_punished_once(scene: LedgerScene) -> None:
    """Evidence does not take a stake that was made later."""
    thief = scene.who("thief").address
    evidence = scene.two_commits("lazy", 3)
    said = {"site": scene.who("lazy").address, "round": 2, "evidence": b"\5" * 32}
    votes = scene.votes(scene.auditors[:3], "Mismatch", **said, challenger=thief)
    scene.refused("NotStaked", "thief", "slashEquivocated", scene.run, *evidence)
    for function, arguments in (
        ("slashEquivocated", evidence),
        ("slashMismatch", (*said.values(), thief, votes)),
    ):
        scene.send("lazy", "stake", scene.run, value=scene.stake)
        scene.send("thief", function, scene.run, *arguments)
        scene.send("lazy", "stake", scene.run, value=scene.stake)
        scene.refused("AlreadyPunished", "thief", function, scene.run, *arguments)
        scene.send("lazy", "leaveRun", scene.run)
        scene.chain.advance(2 * WINDOW + 1)
        scene.send("lazy", "withdrawStake", scene.run)
    # The other order of the roots, or other evidence of the round, is the same offence.
    scene.send("lazy", "stake", scene.run, value=scene.stake)
    number, a, sa, b, sb = evidence
    scene.refused("AlreadyPunished", "thief", "slashEquivocated", scene.run, number, b, sb, a, sa)
    votes = scene.votes(
        scene.auditors[:3], "Mismatch", **{**said, "evidence": b"\6" * 32}, challenger=thief
    )
    scene.refused(
        "AlreadyPunished", "thief", "slashMismatch",
        scene.run, said["site"], 2, b"\6" * 32, thief, votes,
    )  # fmt: skip


def test_what_is_no_equivocation_costs_nothing(scene: LedgerScene) -> None:
    scene.send("site", "stake", scene.run, value=scene.stake)
    number, a, sa, b, sb = scene.two_commits("site")
    args = (scene.run, number)
    scene.refused("NotEquivocation", "thief", "slashEquivocated", *args, a, sa, a, sa)
    own = scene.signed("thief", "Commit", round=number, root=b)
    scene.refused("NotEquivocation", "thief", "slashEquivocated", *args, a, sa, b, own)
    # Two rounds, or another run's id: the signatures give other addresses.
    other = scene.signed("site", "Commit", round=number + 1, root=b)
    scene.refused("NotEquivocation", "thief", "slashEquivocated", *args, a, sa, b, other)
    elsewhere = scene.signed("site", "Commit", run=b"\1" * 32, round=number, root=b)
    scene.refused("NotEquivocation", "thief", "slashEquivocated", *args, a, sa, b, elsewhere)
    with pytest.raises(SettlementError, match="RunLedger refuses"):
        scene.send("thief", "slashEquivocated", *args, a, twin(sa), b, sb)
    scene.refused("NotEquivocation", "thief", "slashForked", scene.run, *scene.two_heads("site"))
    # A head is no commitment, though it has the same fields.
    heads = [scene.signed("site", "Head", size=number, root=each) for each in (a, b)]
    with pytest.raises(SettlementError):
        scene.send("thief", "slashEquivocated", *args, a, heads[0], b, heads[1])
    assert scene.call("isStaked", scene.run, scene.who("site").address)


def test_signatures_for_another_contract_or_chain_count_nowhere_else(
    scene: LedgerScene, chain: Chain
) -> None:
    scene.send("site", "stake", scene.run, value=scene.stake)
    own = scene.ledger("owner").domain
    for domain in (
        Domain(own.chain + 1, own.contract),
        Domain(own.chain, deployed(chain)),
    ):
        said = [
            part
            for each in (b"\1" * 32, b"\2" * 32)
            for part in (
                each,
                domain.sign(scene.who("site"), "Commit", run=scene.run, round=3, root=each),
            )
        ]
        with pytest.raises(SettlementError):
            scene.send("thief", "slashEquivocated", scene.run, 3, *said)
    assert scene.call("isStaked", scene.run, scene.who("site").address)


def test_a_copied_transaction_takes_no_reward_of_a_quorum(scene: LedgerScene) -> None:
    scene.send("lazy", "stake", scene.run, value=scene.stake)
    said = {"site": scene.who("lazy").address, "round": 2, "evidence": b"\5" * 32}
    votes = scene.votes(
        scene.auditors[:3], "Mismatch", **said, challenger=scene.who("challenger").address
    )
    thief = scene.who("thief").address
    with pytest.raises(SettlementError):
        scene.send("thief", "slashMismatch", scene.run, *said.values(), thief, votes)


def test_the_recovered_address_of_the_contract_is_ours(scene: LedgerScene) -> None:
    """Off-chain and on-chain typed data agree, and signatures name their signer."""
    domain = scene.ledger("owner").domain
    said = {"run": scene.run, "round": 1, "root": b"\1" * 32}
    signature = domain.sign(scene.who("site"), "Commit", **said)
    assert domain.signer(signature, "Commit", **said) == scene.who("site").address
    assert domain.signer(signature, "Commit", **{**said, "round": 2}) != scene.who("site").address
    with pytest.raises(SettlementError, match="not a signature"):
        domain.signer(b"short", "Commit", **said)


REENTRANT = bytes.fromhex(
    # With data: jump to `forward`.
    "36 60 1e 57"
    # Without data, as in a payment: call withdraw() of the caller, and take the result as it is.
    "63 3ccfd60b 60 e0 1b 60 00 52 60 00 60 00 60 04 60 00 60 00 33 5a f1 50 00"
    # forward: call the address in the first 32 bytes with the bytes behind it.
    "5b 60 20 36 03 60 20 60 00 37 60 00 60 00 60 20 36 03 60 00 34 60 00 35 5a f1"
    "60 40 57 60 00 60 00 fd 5b 00"
)
"""Code of a contract that calls `withdraw` again from within the payment."""


def test_a_payment_cannot_be_taken_twice_from_within(scene: LedgerScene, chain: Chain) -> None:
    size = len(REENTRANT)
    prefix = bytes.fromhex(f"60{size:02x}600c60003960{size:02x}6000f3")
    thief = chain.pay(data="0x" + (prefix + REENTRANT).hex())["contractAddress"]
    scene.anchor(4)
    tree = ClaimsTree(scene.run, {thief: 2 * ETHER})
    scene.send("owner", "settle", scene.run, 4, tree.root)
    chain.advance(WINDOW + 1)
    scene.send("late", "claim", scene.run, thief, 2 * ETHER, tree.proof(thief))
    before = chain.web3.eth.get_balance(scene.address)
    data = bytes(12) + bytes.fromhex(scene.address[2:]) + Web3.keccak(text="withdraw()")[:4]
    receipt = chain.pay(to=thief, data="0x" + data.hex())
    assert receipt["status"] == 1
    assert chain.web3.eth.get_balance(thief) == 2 * ETHER
    assert chain.web3.eth.get_balance(scene.address) == before - 2 * ETHER


def test_who_cannot_be_paid_keeps_the_credit(scene: LedgerScene, chain: Chain) -> None:
    """A contract that takes no ether: its claim is credited, and nobody else is held up."""
    scene.anchor(4)
    tree = ClaimsTree(
        scene.run, {scene.address: ETHER, scene.who("site").address: ETHER}
    )  # the ledger itself takes no payment
    scene.send("owner", "settle", scene.run, 4, tree.root)
    chain.advance(WINDOW + 1)
    for who in (scene.address, scene.who("site").address):
        scene.send("late", "claim", scene.run, who, ETHER, tree.proof(who))
    assert scene.call("balanceOf", scene.address) == ETHER
    scene.send("site", "withdraw")


def test_the_contract_holds_what_it_owes(chain: Chain) -> None:
    """After stakes, slashes, claims and withdrawals, to the wei."""
    scene = LedgerScene.on(chain, deployed(chain), "books", stake=ETHER + 7)
    for name in ("site", "lazy", "late"):
        scene.send(name, "stake", scene.run, value=scene.stake + 3)
    scene.anchor(4)
    scene.send("challenger", "slashEquivocated", scene.run, *scene.two_commits("lazy"))
    tree = scene.settle({"site": 3 * ETHER + 1, "late": ETHER // 3})
    scene.send("site", "claim", *scene.claim(tree, "site", 3 * ETHER + 1))
    scene.send("site", "withdraw")
    scene.send("late", "claim", *scene.claim(tree, "late", ETHER // 3))
    scene.send("thief", "slashForked", scene.run, *scene.two_heads("owner"))
    scene.send("challenger", "withdraw")
    assert chain.web3.eth.get_balance(scene.address) == scene.owed()
