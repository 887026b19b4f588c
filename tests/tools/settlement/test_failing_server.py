"""A chain's server that is dead, hangs or lies at every command, and is then back.

One line is said, nothing is paid twice, nothing is lost, and the command goes on. The server
answers over real sockets.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")

from hexbytes import HexBytes
from tests.support.chains import ETHER, in_process
from tests.support.fault_proxy import FaultProxy
from tests.support.ledger_scene import WINDOW
from tests.support.second_opinion import second_opinion
from tests.support.zerog_network import RpcServer, answers_of
from web3 import Web3

from dilocox.tools.settlement import ledger, resending, run_on_chain
from dilocox.tools.settlement.chain_heads import chain_heads

from .test_chain_command import ACTIONS, Town

pytestmark = pytest.mark.waits
SENDS = "eth_sendRawTransaction"


class Server:
    """A server of the chain that can fail in many ways."""

    def __init__(
        self, answer: Callable[[str, list[Any]], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._answer, self._patch = answer, monkeypatch
        self.lie: Callable[[str, list[Any]], Any] | None = None
        """What it answers in place of the truth; None: the truth."""
        self._rpc = RpcServer(self._call)
        self.proxy = FaultProxy(self._rpc.port)

    def _call(self, method: str, params: list[Any]) -> Any:
        if self.lie is not None:
            found = self.lie(method, params)
            if found is not None:
                return found
        return self._answer(method, params)

    def become(self, fault: str) -> None:
        """Fail in this way from now on; "pass": not at all."""
        self.proxy.become(fault if fault in ("dead", "silent") else "pass")  # type: ignore[arg-type]
        self.lie = LIES.get(fault)
        # An honest server has all the time that it needs on a busy machine.
        seconds = 60.0 if fault == "pass" else 0.5
        for module, name in ((ledger, "RPC_SECONDS"), (ledger, "PATIENCE"),
                             (resending, "PATIENCE")):  # fmt: skip
            self._patch.setattr(module, name, seconds)

    def close(self) -> None:
        self.proxy.close()
        self._rpc.close()


def swallowed(method: str, params: list[Any]) -> Any:
    """It says that it has a transaction, and throws it away."""
    return Web3.keccak(HexBytes(params[0])).to_0x_hex() if method == SENDS else None


LIES: dict[str, Callable[[str, list[Any]], Any]] = {
    "nonsense": lambda method, params: ["something else"],
    "another chain": lambda method, params: "0x5" if method == "eth_chainId" else None,
    "no contract": lambda method, params: "0x" if method == "eth_getCode" else None,
    "swallows transactions": swallowed,
}
FAULTS = ("dead", "silent", *LIES)
AGAIN = ("silent", "nonsense")
"""Faults that are much like another one."""


@contextmanager
def served(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Town, Server]]:
    """A town whose chain is behind a server."""
    chain = in_process()
    server, real = Server(answers_of(chain), monkeypatch), ledger.connect
    for module in (ledger, run_on_chain):
        url = f"http://127.0.0.1:{server.proxy.port}"
        monkeypatch.setattr(module, "connect", lambda _, url=url: real(url))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    try:
        yield Town(root, chain, capsys), server
    finally:
        server.close()


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in AGAIN)) for each in FAULTS],
)
def test_commands_go_on_when_the_server_is_back(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, capsys, monkeypatch) as (town, server):
        town.deploy()
        for name, action in ACTIONS.items():
            if name == "claim":
                town.chain.advance(WINDOW + 1)
            who = "a" if name == "claim" else "owner"
            count = town.chain.web3.eth.get_transaction_count
            before = count(town.accounts[who])
            words = {"register": town.terms, "stake": ("--amount", 1)}.get(name, ())
            server.become(fault)
            for _ in range(2):
                said = town.run(name, *words, key=who, code=1)
                assert said.count("\n") == 1, said
            assert count(town.accounts[who]) == before
            server.become("pass")
            for _ in range(2):
                action(town)
            sent = count(town.accounts[who]) - before
            assert sent == (2 if name == "claim" else 1), (name, said)  # claim and withdraw
        owed = second_opinion(town.folder, town.state["size"])
        assert town.state["pool"] == 40 * ETHER - owed[town.accounts["a"].lower()]
        # `verify --chain` takes nothing from such a server for true.
        server.become(fault)
        heads = chain_heads(town.folder)
        assert bool(heads.fault) == (fault in ("dead", "silent", "nonsense", "another chain"))
