"""The Flow contract of 0G Storage: files are submitted to it by their roots, and paid for.

A submission has a name of its own, by which the chain's events are searched before anything is
paid. Whoever submits a root, storage nodes take the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from eth_account.signers.local import LocalAccount
from eth_utils.abi import function_signature_to_4byte_selector
from hexbytes import HexBytes
from web3 import Web3
from web3.exceptions import TransactionNotFound
from web3.logs import DISCARD

from dilocox.errors import RecordError, SettlementError
from dilocox.record.bundles.zerog_root import FileTree, identity
from dilocox.tools.settlement.ledger import (
    Keep,
    RefusedError,
    coins,
    logs,
    one_line,
    transact,
)
from dilocox.tools.settlement.resending import Signed

MOST_SEARCHES = 500
"""Requests for events of one file, after which a search ends without an answer."""
_NODES = {"name": "nodes", "type": "tuple[]", "components": [
    {"name": "root", "type": "bytes32"}, {"name": "height", "type": "uint256"}]}  # fmt: skip
_DATA = [{"name": "length", "type": "uint256"}, {"name": "tags", "type": "bytes"}, _NODES]
_SUBMISSION = {"name": "submission", "type": "tuple", "components": [
    {"name": "data", "type": "tuple", "components": _DATA},
    {"name": "submitter", "type": "address"}]}  # fmt: skip


def _function(name: str, output: str, inputs: list[Any] | None = None) -> dict[str, Any]:
    kind = "view" if inputs is None else "payable"
    outputs = [{"name": "", "type": each} for each in output.split()]
    return {"type": "function", "name": name, "inputs": inputs or [], "outputs": outputs,
            "stateMutability": kind}  # fmt: skip


ABI: list[dict[str, Any]] = [
    _function("submit", "uint256 bytes32 uint256 uint256", [_SUBMISSION]),
    _function("market", "address"),
    _function("firstBlock", "uint256"),
    {"type": "event", "name": "Submit", "anonymous": False, "inputs": [
        {"name": "sender", "type": "address", "indexed": True},
        {"name": "identity", "type": "bytes32", "indexed": True},
        {"name": "submissionIndex", "type": "uint256", "indexed": False},
        {"name": "startPos", "type": "uint256", "indexed": False},
        {"name": "length", "type": "uint256", "indexed": False},
        {"name": "submission", "type": "tuple", "indexed": False, "components": _DATA},
    ]},
]  # fmt: skip
"""The part of the contract's interface that is used."""
_ERRORS = {
    "0x" + function_signature_to_4byte_selector(each).hex(): each.partition("(")[0]
    for each in ("NotEnoughFee(uint256,uint256,uint256)", "InvalidSubmission()", "EnforcedPause()")
}


class UnknownError(RecordError):
    """The chain's server gives too few events at once to search the chain."""


@dataclass(frozen=True)
class Submitted:
    """A file that was submitted."""

    transaction: str
    """Hash of the transaction, hex without 0x."""
    sequence: int
    """Number of the submission at the contract."""
    paid: int = 0
    """Wei that were paid for the storage now; 0 if it was submitted before."""


class Flow:
    """The contract, seen by one account."""

    def __init__(self, web3: Web3, address: str, account: LocalAccount, fee: int) -> None:
        """Look at a contract. It is not called.

        Args:
            web3: Connection to an RPC server.
            address: The contract's.
            account: Who signs and pays.
            fee: Wei that one transaction may cost, its payment for the storage included.

        Raises:
            RecordError: `address` is none.
        """
        if not Web3.is_address(address):
            raise RecordError(f"{address}: not a contract's address, 40 hex digits after 0x")
        self.web3, self.account, self.fee = web3, account, fee
        self.address = Web3.to_checksum_address(address)
        self._contract = web3.eth.contract(address=self.address, abi=ABI)

    def check(self) -> None:
        """Raise `RecordError` unless the address has a contract with a market for storage."""
        self._price()

    def find(self, tree: FileTree) -> Submitted | None:
        """Return the newest submission of a file; None if it was never submitted.

        Raises:
            UnknownError: The chain cannot be searched in `MOST_SEARCHES` requests.
            RecordError: The server fails.
        """
        event, own = self._contract.events.Submit(), {"identity": identity(tree)}
        with _flow_errors("search"):
            last = int(self.web3.eth.block_number)
            first = min(last, int(self._contract.functions.firstBlock().call()))
            pages = logs(event, "search", own, first, last, newest=True)
            for page in islice(pages, MOST_SEARCHES):
                # A server that ignores the filter must not make another file of this one.
                found = [each for each in page if self._is_of(tree, each)]
                if found:
                    return _submitted(found[-1])
            if next(pages, None) is None:
                return None
        raise UnknownError("the chain's server gives too few blocks at once; name another server")

    def among(self, tree: FileTree, sent: Sequence[Signed]) -> Submitted | None:
        """Return the submission of a file by one of the account's own transactions, or None.

        A receipt is there at once. Events and storage nodes may be behind.

        Raises:
            RecordError: The server fails.
        """
        data = bytes(HexBytes(self._contract.encode_abi("submit", [self._said(tree)])))
        for each in reversed(sent):
            if each.data != data:
                continue
            with _flow_errors("search"), suppress(TransactionNotFound):
                found = self._received(tree, each.hash)
                if found is not None:
                    return found
        return None

    def submit(self, tree: FileTree, keep: Keep) -> Submitted:
        """Submit a file, pay for its storage, and wait until a block has the transaction.

        Args:
            tree: The file's tree.
            keep: Keeps the signed transaction before it is sent.

        Raises:
            RecordError: The server fails, the contract refuses, the costs are above the limit, or
                no block has the transaction in time.
        """
        value = tree.sectors * self._price()
        if value > self.fee:
            raise RecordError(
                f"to store {tree.size:,} bytes costs {coins(value)}, more than {coins(self.fee)}: "
                "allow it with --most-fee"
            )
        with _flow_errors("submit"):
            call = self._contract.functions.submit(self._said(tree))
            base = {"value": value, "chainId": int(self.web3.eth.chain_id)}
            sent = transact(self.web3, self.account, call, base, keep, self.fee - value)
            found = self._received(tree, bytes(HexBytes(sent.hash)))
            if found is not None:
                return replace(found, paid=value)
        raise RecordError(f"submit: transaction {sent.hash} has no event of {self.address}")

    def _said(self, tree: FileTree) -> Any:
        """Return what a submission says."""
        nodes = [(node.root, node.height) for node in tree.nodes]
        return (tree.size, b"", nodes), self.account.address

    def _received(self, tree: FileTree, hash_: bytes) -> Submitted | None:
        """Return the submission of a file by a transaction in a block; None if it made none."""
        receipt = self.web3.eth.get_transaction_receipt(HexBytes(hash_))
        found = self._contract.events.Submit().process_receipt(receipt, errors=DISCARD)
        return next((_submitted(each) for each in found if self._is_of(tree, each)), None)

    def _is_of(self, tree: FileTree, event: Any) -> bool:
        """Return True if an event is this contract's, of a submission of this file."""
        named = bytes(event["args"]["identity"]) == identity(tree)
        return named and Web3.to_checksum_address(event["address"]) == self.address

    def _price(self) -> int:
        """Return the price of a chunk, wei."""
        with _flow_errors("price of storage"):
            market = self._contract.functions.market().call()
            sells = self.web3.eth.contract(market, abi=[_function("pricePerSector", "uint256")])
            return int(sells.functions.pricePerSector().call())


class FlowRefusedError(RecordError):
    """The contract, or the chain's server, has refused a call."""


@contextmanager
def _flow_errors(what: str) -> Iterator[None]:
    """Turn errors of the chain into a `RecordError` of one line that names the call."""
    try:
        with one_line(what):
            yield
    except RefusedError as error:
        reason = _ERRORS.get(error.reason, error.reason)
        raise FlowRefusedError(f"{what}: the chain refuses: {reason}") from None
    except SettlementError as error:
        raise RecordError(str(error)) from None


def _submitted(event: Any) -> Submitted:
    hash_ = bytes(event["transactionHash"]).hex()
    return Submitted(hash_, int(event["args"]["submissionIndex"]))
