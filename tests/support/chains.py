"""Chains for tests: in process (eth-tester) or a process of its own (anvil)."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from eth_account import Account
from eth_account.signers.local import LocalAccount
from eth_tester import EthereumTester, PyEVMBackend
from eth_tester.exceptions import TransactionFailed
from eth_utils.crypto import keccak
from scripts.npm_packages import anvil as anvil_program
from web3 import EthereumTesterProvider, Web3
from web3.types import RPCEndpoint

from dilocox.tools.settlement.ledger import connect

# Python's default. py-evm raises it to 100,000 when it is imported, and then deeply nested JSON, in
# another test of this process, would overflow the stack of C.
sys.setrecursionlimit(1000)

ETHER = 10**18
MOST_GAS = 5_000_000
"""More than any transaction here needs."""


@dataclass
class Chain:
    """A chain with no contracts, on which the tests own all accounts."""

    web3: Web3
    advance: Callable[[int], None]
    """Make the time of the next block later by so many seconds, at least."""
    url: str = ""
    known: set[str] = field(default_factory=set)
    """Names of accounts that have ether."""

    def funded(self, name: str, ether: int = 1000) -> LocalAccount:
        """Return the account of a name; at its first use it gets `ether`."""
        account = account_of(name)
        if name not in self.known:
            self.known.add(name)
            self.pay(to=account.address, value=ether * ETHER)
        return account

    def pay(self, **transaction: Any) -> Any:
        """Send a transaction of an account with very much ether; return its receipt."""
        payment = {"from": self.web3.eth.accounts[0], **transaction}
        return self.web3.eth.wait_for_transaction_receipt(self.web3.eth.send_transaction(payment))


@cache
def account_of(name: str) -> LocalAccount:
    """Return the account of a name."""
    account: LocalAccount = Account.from_key(keccak(text=name))
    return account


class _InProcess(EthereumTesterProvider):
    """Answers a refusal of a contract as servers do: with the encoded error as data.

    It estimates gas by one call, because eth-tester's own search takes most of the tests' time.
    """

    def make_request(self, method: Any, params: Any) -> Any:
        try:
            if method == "eth_estimateGas":
                super().make_request(RPCEndpoint("eth_call"), params)
                return {"jsonrpc": "2.0", "id": 1, "result": MOST_GAS}
            return super().make_request(method, params)
        except TransactionFailed as error:
            text = str(error).removeprefix("execution reverted: ")
            data = "0x" + (ast.literal_eval(text) if text.startswith("b") else b"").hex()
            said = {"code": 3, "message": "execution reverted", "data": data}
            return {"jsonrpc": "2.0", "id": 1, "error": said}


def in_process() -> Chain:
    """Return a chain inside this process."""
    tester = EthereumTester(PyEVMBackend())

    def advance(seconds: int) -> None:
        tester.time_travel(int(tester.get_block_by_number("latest")["timestamp"]) + seconds)
        tester.mine_block()  # so that the newest block has that time, as on anvil

    return Chain(Web3(_InProcess(tester)), advance)


@contextmanager
def anvil() -> Iterator[Chain]:
    """A chain in a process of its own, which ends with the context."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = ["--silent", "--hardfork", "cancun", "--balance", "1000000"]
    command = [str(anvil_program()), "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        chain = Chain(connect(f"http://127.0.0.1:{port}"), lambda seconds: None)
        chain.url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 60
        while not chain.web3.is_connected():
            assert process.poll() is None, f"anvil ended with {process.returncode}"
            assert time.monotonic() < until, "anvil does not answer"
            time.sleep(0.05)

        def advance(seconds: int) -> None:
            for method, params in (("evm_increaseTime", [seconds]), ("evm_mine", [])):
                chain.web3.provider.make_request(method, params)  # type: ignore[arg-type]

        chain.advance = advance
        yield chain
    finally:
        process.terminate()
        process.wait()
