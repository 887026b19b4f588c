"""A deployed `RunLedger`: calls, transactions and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eth_account.signers.local import LocalAccount
from eth_utils.abi import function_abi_to_4byte_selector
from eth_utils.crypto import keccak
from hexbytes import HexBytes
from requests.exceptions import RequestException
from web3 import HTTPProvider, Web3
from web3.exceptions import (
    ContractCustomError,
    ContractLogicError,
    TransactionNotFound,
    Web3Exception,
    Web3RPCError,
)

from dilocox.errors import SettlementError
from dilocox.tools.settlement.artifact import load_artifact
from dilocox.tools.settlement.messages import Domain

PATIENCE = 120.0
"""Seconds that a transaction may take until it is in a block."""
RPC_SECONDS = 20.0
"""Seconds that an RPC server may take for one answer."""
Keep = Callable[[bytes, bytes], None]
"""Called with hash and bytes of a signed transaction before it is sent."""


def connect(url: str) -> Web3:
    """Return a connection to the RPC server at `url`. It is not tried."""
    return Web3(HTTPProvider(url, request_kwargs={"timeout": RPC_SECONDS}))


@dataclass(frozen=True)
class Sent:
    """A transaction that is in a block."""

    hash: str
    gas: int
    """Gas that it has used."""
    contract: str | None
    """Address of the contract that it has created."""


class Ledger:
    """A `RunLedger`, seen by one account."""

    def __init__(self, web3: Web3, address: str, account: LocalAccount | None = None) -> None:
        """`address`: the contract's. `account`: who signs transactions; None: only calls."""
        self.web3, self.account = web3, account
        self.address = Web3.to_checksum_address(address)
        self._contract = web3.eth.contract(address=self.address, abi=load_artifact().abi)

    @property
    def abi(self) -> list[dict[str, Any]]:
        """The contract's interface."""
        return load_artifact().abi

    @property
    def domain(self) -> Domain:
        """The domain of messages to this contract. Raises `SettlementError` like `call`."""
        with _named("eth_chainId"):
            return Domain(self.web3.eth.chain_id, self.address)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function without a transaction; return its result.

        Raises `SettlementError` if the RPC server fails, or the contract refuses.
        """
        with _named(name):
            return self._contract.functions[name](*arguments).call()

    def state(self, run: bytes) -> dict[str, Any]:
        """Return all that the contract keeps about a run, by name; zeros if it is unknown.

        Raises `SettlementError` like `call`.
        """
        (abi,) = (each for each in self.abi if each.get("name") == "runOf")
        names = [each["name"] for each in abi["outputs"][0]["components"]]
        return dict(zip(names, self.call("runOf", run), strict=True))

    def send(self, name: str, *arguments: Any, value: int = 0, keep: Keep | None = None) -> Sent:
        """Send a transaction that calls a function; wait until it is in a block.

        Args:
            name: The function.
            arguments: Its arguments.
            value: Wei to pay.
            keep: Keeps the signed transaction before it is sent.

        Raises:
            SettlementError: The RPC server fails, the contract refuses, or no block has the
                transaction in time.
        """
        with _named(name):
            function = self._contract.functions[name](*arguments)
            return _sent(self.web3, self._signing(), function, value, keep)

    def events(self, name: str, run: bytes, first: int = 0) -> list[dict[str, Any]]:
        """Return the arguments of all events of a run, from block `first`, in order.

        Raises `SettlementError` if the RPC server fails.
        """
        with _named(name):
            event = self._contract.events[name]()
            found = event.get_logs(from_block=first, argument_filters={"run": run})
            return [dict(each["args"]) for each in found]

    def now(self) -> int:
        """Return the time of the newest block, seconds. Raises `SettlementError` like `call`."""
        with _named("eth_getBlockByNumber"):
            return int(self.web3.eth.get_block("latest")["timestamp"])

    def block(self) -> int:
        """Return the number of the newest block. Raises `SettlementError` like `call`."""
        with _named("eth_blockNumber"):
            return int(self.web3.eth.block_number)

    def _signing(self) -> LocalAccount:
        if self.account is None:
            raise SettlementError("no key: this needs an account that signs")
        return self.account


def deploy(web3: Web3, account: LocalAccount, keep: Keep | None = None) -> Sent:
    """Deploy a `RunLedger`. Raises `SettlementError` like `Ledger.send`."""
    artifact = load_artifact()
    with _named("deploy"):
        contract = web3.eth.contract(abi=artifact.abi, bytecode=artifact.bytecode)
        return _sent(web3, account, contract.constructor(), 0, keep)


def send_again(web3: Web3, hash_: bytes, signed: bytes) -> Sent:
    """Send a kept transaction again, unless a block has it already; wait for its block.

    Its number (nonce) lets it count once. Raises `SettlementError` like `Ledger.send`.
    """
    with _named("send"):
        try:
            web3.eth.get_transaction(HexBytes(hash_))
        except TransactionNotFound:
            web3.eth.send_raw_transaction(signed)
        return _received(web3, hash_)


def run_id(owner: str, log: str) -> bytes:
    """Return a run's id in a ledger. `owner`: address; `log`: id of the run's log, 64 hex."""
    padded = bytes(12) + bytes.fromhex(owner.removeprefix("0x"))
    return bytes(keccak(padded + bytes.fromhex(log)))


def _sent(web3: Web3, account: LocalAccount, call: Any, value: int, keep: Keep | None) -> Sent:
    base = {
        "from": account.address,
        "value": value,
        "nonce": web3.eth.get_transaction_count(account.address, "pending"),
    }
    signed = account.sign_transaction(call.build_transaction(base))
    if keep is not None:
        keep(bytes(signed.hash), bytes(signed.raw_transaction))
    web3.eth.send_raw_transaction(signed.raw_transaction)
    return _received(web3, signed.hash)


def _received(web3: Web3, hash_: bytes) -> Sent:
    receipt = web3.eth.wait_for_transaction_receipt(hash_, timeout=PATIENCE)
    if receipt["status"] != 1:
        raise RefusedError(f"transaction 0x{hash_.hex()}", "in its block", "the chain")
    return Sent("0x" + hash_.hex(), receipt["gasUsed"], receipt["contractAddress"])


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn errors of the chain into one line that names the call."""
    try:
        yield
    except ContractCustomError as error:
        raise RefusedError(what, _error_name(str(error.data))) from None
    except (ContractLogicError, Web3RPCError) as error:
        raise RefusedError(what, " ".join(str(error).split())[:300], "the chain") from None
    except (Web3Exception, RequestException, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        raise SettlementError(f"{what}: the chain's server failed: {text}") from None


class RefusedError(SettlementError):
    """The contract, or the chain's server, has refused a call."""

    permanent = True

    def __init__(self, call: str, reason: str, by: str = "RunLedger") -> None:
        super().__init__(f"{call}: {by} refuses: {reason}")
        self.reason = reason
        """Name of the contract's error."""


def _error_name(data: str) -> str:
    """Return the name of the contract's error whose encoding is `data`."""
    known = {
        "0x" + function_abi_to_4byte_selector(each).hex(): str(each["name"])
        for each in load_artifact().abi
        if each["type"] == "error"
    }
    return known.get(data[:10], data[:10])
