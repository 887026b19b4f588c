"""Transactions that were signed are counted once, whatever the chain's server says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from tests.support.chains import ETHER, Chain
from tests.support.ledger_scene import LedgerScene
from web3.exceptions import Web3RPCError

from dilocox.errors import SettlementError
from dilocox.tools.settlement import ledger as ledgers
from dilocox.tools.settlement import settling
from dilocox.tools.settlement.cancelling import cancel
from dilocox.tools.settlement.journal import Journal, append_lines, read_lines
from dilocox.tools.settlement.ledger import Ledger, RefusedError, connect
from dilocox.tools.settlement.resending import Signed
from dilocox.tools.settlement.run_on_chain import Desk
from dilocox.tools.settlement.settling import deploy_once


def refusing(message: str) -> Any:
    def send(*_: object, **__: object) -> None:
        raise Web3RPCError(message)

    return send


def desk_of(scene: LedgerScene, folder: Path) -> Desk:
    return Desk(scene.ledger("owner"), folder)


def fund(desk: Desk, scene: LedgerScene) -> None:
    with desk.opened():
        desk.send("fund", scene.run, value=ETHER)


def leave_open(desk: Desk, scene: LedgerScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign a funding that the server refuses."""
    with monkeypatch.context() as patch:
        patch.setattr(scene.chain.web3.eth, "send_raw_transaction", refusing("no"))
        with pytest.raises(RefusedError):
            fund(desk, scene)


def test_a_refusal_by_the_server_leaves_the_transaction_open(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, eth = desk_of(scene, tmp_path), scene.chain.web3.eth
    before = scene.state["pool"]
    with monkeypatch.context() as patch:
        patch.setattr(eth, "send_raw_transaction", refusing("the pool of transactions is full"))
        for _ in range(2):  # at first sent, then sent again
            with pytest.raises(RefusedError, match="is full"):
                fund(desk, scene)
    ((_, signed),) = desk.journal.open().items()
    assert Signed(b"", bytes.fromhex(signed)).function == "fund"
    with desk.opened():
        assert desk.finished == ["fund"]
    with desk.opened():
        assert desk.finished == []
    assert scene.state["pool"] == before + ETHER


@pytest.mark.parametrize("message", ["already known", "some words of a server of its own"])
def test_a_transaction_that_the_server_has_already_is_sent(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    desk, eth = desk_of(scene, tmp_path), scene.chain.web3.eth
    before, real = scene.state["pool"], eth.send_raw_transaction

    def twice(signed: Any) -> None:
        real(signed)
        raise Web3RPCError(message)

    monkeypatch.setattr(eth, "send_raw_transaction", twice)
    fund(desk, scene)
    assert desk.journal.open() == {}
    assert scene.state["pool"] == before + ETHER


def test_a_transaction_whose_number_another_one_has_used_is_forgotten(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_of(scene, tmp_path)
    leave_open(desk, scene, monkeypatch)
    scene.send("owner", "fund", scene.run, value=1)
    with desk.opened():
        assert (desk.finished, desk.journal.open()) == ([], {})


def test_a_deployment_whose_number_was_used_does_not_stop_the_next_one(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, journal = chain.funded("deployer"), Journal(tmp_path / "deploy.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(chain.web3.eth, "send_raw_transaction", refusing("no"))
        with pytest.raises(RefusedError):
            deploy_once(chain.web3, account, journal)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "open", dict)
        first = deploy_once(chain.web3, account, journal)[0]
    assert deploy_once(chain.web3, account, journal)[0] == first
    assert journal.open() == {}
    second = deploy_once(chain.web3, account, journal, again=True)[0]
    assert second != first
    assert deploy_once(chain.web3, account, journal)[:2] == [second, first]


def test_a_fee_above_the_limit_is_refused_before_anything_is_signed(scene: LedgerScene) -> None:
    kept: list[bytes] = []
    ledger = Ledger(scene.chain.web3, scene.address, scene.who("owner"), fee=1000)
    with pytest.raises(SettlementError, match=r"more than 0\.000000000000001 coins.*--most-fee"):
        ledger.send("fund", scene.run, value=1, keep=lambda *said: kept.extend(said))
    assert kept == []


def estimating(patch: pytest.MonkeyPatch, scene: LedgerScene) -> None:
    """Let the server estimate gas as others do: whatever the account has, and its next number."""
    patch.setattr(scene.chain.web3.eth, "estimate_gas", lambda *_: 100_000)


def test_what_the_account_cannot_pay_is_not_kept(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers refuse it each time, and it would hold up all later ones."""
    scene.chain.pay(to=scene.who("poor").address, value=ETHER)
    desk = Desk(scene.ledger("poor"), tmp_path)
    before = scene.state["pool"]
    with monkeypatch.context() as patch:
        estimating(patch, scene)
        with (
            pytest.raises(SettlementError, match="holds 1 coins, and a payment with its fee could"),
            desk.opened(),
        ):
            desk.send("fund", scene.run, value=ETHER - 10**12)
    assert desk.journal.sent() == []
    with desk.opened():
        desk.send("fund", scene.run, value=ETHER // 2)
    assert scene.state["pool"] == before + ETHER // 2


def test_a_stuck_transaction_is_named_and_can_be_dropped(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, eth = desk_of(scene, tmp_path), scene.chain.web3.eth
    before = scene.state["pool"]
    leave_open(desk, scene, monkeypatch)
    number = eth.get_transaction_count(desk.account.address)
    with monkeypatch.context() as patch:
        patch.setattr(eth, "send_raw_transaction", refusing("insufficient funds"))
        said = rf"number {number} \(fund of 1 coins\); to drop it: dilocox chain cancel: the chain"
        for _ in range(2):  # the empty one is not sent either
            with pytest.raises(RefusedError, match=said):
                fund(desk, scene)
            with pytest.raises(RefusedError, match=said):
                cancel(desk)
    assert cancel(desk) == [f"transaction number {number} (fund of 1 coins): dropped"]
    assert (desk.journal.open(), desk.journal.late(), scene.state["pool"]) == ({}, [], before)
    assert "no transaction of" in cancel(desk)[0]
    fund(desk, scene)
    assert scene.state["pool"] == before + ETHER


def test_what_a_block_has_taken_is_not_dropped(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, before = desk_of(scene, tmp_path), scene.state["pool"]
    with monkeypatch.context() as patch:
        patch.setattr(scene.chain.web3.eth, "wait_for_transaction_receipt", refusing("no answer"))
        with pytest.raises(RefusedError):
            fund(desk, scene)
    assert [each.rpartition(": ")[2] for each in cancel(desk)] == ["a block has taken it"]
    assert (desk.journal.open(), scene.state["pool"]) == ({}, before + ETHER)


def test_a_transaction_before_the_stuck_one_that_is_missing_is_named(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, eth = desk_of(scene, tmp_path), scene.chain.web3.eth
    count = type(eth).get_transaction_count
    used = eth.get_transaction_count(desk.account.address)
    with monkeypatch.context() as patch:
        patch.setattr(type(eth), "get_transaction_count", lambda *said: count(*said) + 1)
        estimating(patch, scene)
        leave_open(desk, scene, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(eth, "send_raw_transaction", refusing("nonce too high"))
        with pytest.raises(RefusedError, match=f"which waits for number {used} of the account"):
            fund(desk, scene)


def test_nothing_is_signed_for_another_chain(scene: LedgerScene) -> None:
    right = scene.chain.web3.eth.chain_id
    kept: list[bytes] = []
    ledger = Ledger(scene.chain.web3, scene.address, scene.who("owner"), chain=right + 1)
    with pytest.raises(SettlementError, match=f"is of chain {right}, the run of chain {right + 1}"):
        ledger.send("fund", scene.run, value=1, keep=lambda *said: kept.extend(said))
    with pytest.raises(SettlementError, match="is of chain"):
        _ = ledger.domain
    assert kept == []


def test_a_request_is_not_repeated_and_its_url_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    web3 = connect("http://user:geheim@127.0.0.1:9/v3/0123secret?key=other")
    assert web3.provider.exception_retry_configuration is None  # type: ignore[attr-defined]
    with pytest.raises(SettlementError, match="the chain's server failed") as caught:
        ledgers.chain_of(web3)
    said = str(caught.value)
    assert not [1 for part in ("geheim", "0123secret", "other") if part in said], said
    assert "127.0.0.1" in said


@pytest.mark.parametrize("answer", [{}, {"result": None}, {"result": [3]}, {"result": {"a": 1}}])
def test_rubbish_answers_are_one_line(
    scene: LedgerScene, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    said = {"jsonrpc": "2.0", "id": 1, **answer}
    web3 = connect("http://127.0.0.1:9")
    monkeypatch.setattr(web3.provider, "make_request", lambda method, params: said)
    ledger = Ledger(web3, scene.address, scene.who("owner"))
    for call in (
        lambda: ledger.state(scene.run),
        ledger.now,
        ledger.block,
        lambda: ledger.events("Anchored", scene.run),
        lambda: ledger.send("fund", scene.run),
    ):
        with pytest.raises(SettlementError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_what_is_no_contracts_address_is_one_line(chain: Chain) -> None:
    for text in ("0x33", "", "zz"):
        with pytest.raises(SettlementError, match="not a contract's address"):
            Ledger(chain.web3, text)


def test_a_line_that_a_crash_has_cut_short_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == []
    append_lines(path, [{"a": 1}, {"b": 2}])
    for torn in (b'{"c"', b'{"c": 3}'):
        with path.open("ab") as file:
            file.write(torn)
        assert read_lines(path) == [{"a": 1}, {"b": 2}]
    append_lines(path, [{"d": 4}])
    assert path.read_text().splitlines() == [json.dumps(each) for each in read_lines(path)]
    assert read_lines(path)[2:] == [{"d": 4}]


def test_what_another_command_has_finished_is_told_to_its_own_command(
    scene: LedgerScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_of(scene, tmp_path)
    leave_open(desk, scene, monkeypatch)
    with desk_of(scene, tmp_path).opened():
        pass
    for _ in range(2):  # until it is told
        with desk.opened():
            assert desk.finished == []
            late = desk.journal.late()
            assert [(each.function, each.value) for each in late] == [("fund", ETHER)]
    desk.journal.told(late)
    assert (desk.journal.late(), desk.journal.open()) == ([], {})
    fund(desk, scene)
    assert desk.journal.late() == [], "finished by its own command"


def test_a_deployment_that_a_crash_cut_short_counts_once_if_the_server_dies_again(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, journal = chain.funded("deployer"), Journal(tmp_path / "deploy.jsonl")
    first = deploy_once(chain.web3, account, journal)[0]
    for module, name in ((chain.web3.eth, "send_raw_transaction"), (settling, "has_code")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refusing("no"))
            with pytest.raises((SettlementError, Web3RPCError)):
                deploy_once(chain.web3, account, journal, again=True)
    said = deploy_once(chain.web3, account, journal, again=True)
    assert (len(said), said[1]) == (3, first)
    assert "deployed already" in said[2]
