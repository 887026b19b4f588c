"""A transaction whose fee has become too low is replaced, and counts once; events come in pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.chains import ETHER, Chain, account_of
from tests.support.ledger_scene import LedgerScene
from web3.exceptions import Web3RPCError

from dilocox.errors import SettlementError
from dilocox.tools.settlement import ledger as ledgers
from dilocox.tools.settlement import resending
from dilocox.tools.settlement.ledger import Ledger, RefusedError
from dilocox.tools.settlement.resending import Signed
from dilocox.tools.settlement.run_on_chain import Desk

GWEI = 10**9
Scenes = Callable[..., LedgerScene]


def signed(tip: int, most: int, **more: Any) -> Signed:
    said = {
        "type": 2, "chainId": 7, "nonce": 3, "gas": 100_000, "value": 5, "data": b"\1\2",
        "to": "0x" + "11" * 20, "maxPriorityFeePerGas": tip, "maxFeePerGas": most, **more,
    }  # fmt: skip
    found = account_of("owner").sign_transaction(said)
    return Signed(bytes(found.hash), bytes(found.raw_transaction))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 50 * GWEI), st.integers(1, 50 * GWEI), st.integers(0, 200 * GWEI),
    st.integers(0, 50 * GWEI),
)  # fmt: skip
def test_a_replacement_is_the_same_call_with_a_fee_that_servers_take(
    tip: int, more: int, base: int, wanted: int
) -> None:
    before = signed(tip, tip + more)
    found = before.higher(account_of("owner"), base, wanted, 10**30)
    if found is None:
        return
    old, new = before._fields, found._fields
    assert (new[0], new[1], new[4:9]) == (old[0], old[1], old[4:9])
    tips, most = ([int.from_bytes(each[n]) for each in (old, new)] for n in (2, 3))
    assert tips[1] * 10 > tips[0] * 11 or tips[0] == 0
    assert most[1] * 10 > most[0] * 11
    assert most[1] >= 2 * base + tips[1]
    assert found.higher(account_of("owner"), base, wanted, 10**30) is None
    assert found.number == before.number == 3
    assert found.value == before.value == 5


@pytest.mark.parametrize(
    ("tip", "most", "base", "wanted", "limit", "replaced"),
    [  # gwei per gas; the limit in gwei, for 100,000 gas
        (2, 40, 10, 2, 10**9, False),  # pays what is asked for
        (2, 40, 10, 1, 10**9, False),  # pays more
        (2, 12, 10, 2, 10**9, False),  # just pays it
        (2, 11, 10, 2, 10**9, True),  # leaves its producer one of two
        (2, 40, 50, 2, 10**9, True),  # cannot pay what is burnt
        (1, 40, 0, 5, 10**9, True),  # the tip has risen, and next to nothing is burnt
        (1, 40, 0, 5, 4_000_000, False),  # the same, but the fee would exceed the limit
        (30, 40, 20, 5, 10**9, False),  # less tip is left than it allows, and more than is asked
    ],
)
def test_a_transaction_is_replaced_if_others_pay_more(
    tip: int, most: int, base: int, wanted: int, limit: int, replaced: bool
) -> None:
    before = signed(tip * GWEI, most * GWEI)
    found = before.higher(account_of("owner"), base * GWEI, wanted * GWEI, limit * GWEI)
    assert (found is not None) == replaced


def test_a_replacement_keeps_to_the_limit_of_fees() -> None:
    with pytest.raises(SettlementError, match="--most-fee"):
        signed(1, 2).higher(account_of("owner"), 50 * GWEI, GWEI, 10**15)
    created = signed(1, 2, to="")
    again = created.higher(account_of("owner"), GWEI, GWEI, 10**18)
    assert again is not None
    assert again._fields[5] == b"", "it creates a contract"


@pytest.mark.slow  # anvil comes from the registry of npm
@pytest.mark.parametrize("chain", ["anvil"], indirect=True)
def test_a_stuck_transaction_is_replaced_and_counts_once(
    chain: Chain, scene_of: Scenes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, ask = scene_of(), chain.web3.provider.make_request
    desk = Desk(scene.ledger("owner"), tmp_path)
    before = scene.state["pool"]

    def fund() -> None:
        with desk.opened():
            desk.send("fund", scene.run, value=ETHER)

    ask("evm_setAutomine", [False])  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "PATIENCE", 0.5)
        with pytest.raises(SettlementError, match="not in the chain after"):
            fund()
    # The next blocks burn more than the transaction can pay.
    for _ in range(2):
        ask("anvil_setNextBlockBaseFeePerGas", [hex(100 * GWEI)])  # type: ignore[arg-type]
        ask("evm_mine", [])  # type: ignore[arg-type]
    ((first, _),) = desk.journal.open().items()
    assert scene.state["pool"] == before
    with monkeypatch.context() as patch:
        patch.setattr(resending, "PATIENCE", 0.5)
        with pytest.raises(SettlementError, match="run this again"):
            fund()
        assert len(desk.journal.open()) == 2, "the first one and its replacement"
    ask("evm_setAutomine", [True])  # type: ignore[arg-type]
    ask("evm_mine", [])  # type: ignore[arg-type]
    with desk.opened():
        assert (desk.finished, desk.journal.open()) == (["fund"], {})
    assert scene.state["pool"] == before + ETHER
    mined = chain.web3.eth.get_block("latest", full_transactions=True)["transactions"]
    assert first not in [each["hash"].hex() for each in mined]  # type: ignore[index]


def refusing_long_ranges(chain: Chain, most: int, asked: list[int]) -> Any:
    real = chain.web3.eth.get_logs

    def get_logs(said: Any) -> Any:
        first, last = (int(str(said[name]), 16) if isinstance(said[name], str) else said[name]
                       for name in ("fromBlock", "toBlock"))  # fmt: skip
        asked.append(last - first + 1)
        if last - first + 1 > most:
            raise Web3RPCError(f"query exceeds {most} blocks")
        return real(said)

    return get_logs


def test_events_are_asked_for_in_the_pages_that_a_server_allows(
    chain: Chain, scene: LedgerScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scene.ledger("owner").block()
    for size in range(1, 9):
        scene.anchor(size)
    scene.chain.advance(1)
    ledger: Ledger = scene.ledger("owner")
    whole = ledger.events("Anchored", scene.run, first)
    assert [each["size"] for each in whole] == list(range(1, 9))
    monkeypatch.setattr(ledgers, "LEAST_BLOCKS", 1)
    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(chain.web3.eth, "get_logs", refusing_long_ranges(chain, 3, asked))
        assert ledger.events("Anchored", scene.run, first) == whole
    assert max(asked) > 3
    assert sum(each <= 3 for each in asked) > 2
    with monkeypatch.context() as patch:
        patch.setattr(chain.web3.eth, "get_logs", refusing_long_ranges(chain, 0, asked))
        with pytest.raises(RefusedError, match="query exceeds 0 blocks"):
            ledger.events("Anchored", scene.run, first)
    assert ledger.events("Anchored", scene.run, ledger.block() + 5) == []
