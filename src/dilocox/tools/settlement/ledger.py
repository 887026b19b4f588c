"""A deployed `RunLedger`: calls, transactions and their errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

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
from dilocox.tools.settlement.limits import FEE
from dilocox.tools.settlement.messages import Domain
from dilocox.utils.secret_text import hide_secrets, users_of

PATIENCE = 120.0
"""Seconds that a transaction may take until it is in a block."""
RPC_SECONDS = 20.0
"""Seconds that an RPC server may take for one answer."""
LEAST_BLOCKS = 100
"""Blocks of which a server must give all events at once."""
KNOWN = ("already known", "alreadyknown", "already imported", "known transaction")
"""Parts of servers' messages on a transaction that they have already."""
Keep = Callable[[bytes, bytes], None]
"""Called with hash and bytes of a signed transaction before it is sent."""


def connect(url: str) -> Web3:
    """Return a connection to the RPC server at `url`. It is not tried.

    A failed request is not repeated by itself: a second try of a transaction that has arrived
    would be refused, and a time limit would hold for each try alone.
    """
    options = {"timeout": RPC_SECONDS}
    return Web3(HTTPProvider(url, request_kwargs=options, exception_retry_configuration=None))


def host_of(url: str) -> str:
    """Return host and port of a URL; its other parts may hold a secret."""
    if any(re.search("[/?#]", user) for user in users_of(url)):
        return "no host"  # a password like this one moves what urlsplit takes for the host
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or "no host"
    except ValueError:
        return "no host"


def public_part(url: str) -> str:
    """Return a URL without user, path and query, which may hold a secret."""
    return f"{url.partition('://')[0]}://{host_of(url)}" if "://" in url else url


def chain_of(web3: Web3) -> int:
    """Return the chain's id (EIP-155). Raises `SettlementError` if the RPC server fails."""
    with one_line("eth_chainId"):
        return int(web3.eth.chain_id)


def has_code(web3: Web3, address: str) -> bool:
    """Return whether there is a contract. Raises `SettlementError` if the RPC server fails."""
    with one_line("eth_getCode"):
        return bool(web3.eth.get_code(Web3.to_checksum_address(address)))


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

    def __init__(
        self, web3: Web3, address: str, account: LocalAccount | None = None,
        chain: int | None = None, fee: int = FEE,
    ) -> None:  # fmt: skip
        """Look at a contract. It is not called.

        Args:
            web3: Connection to an RPC server.
            address: The contract's.
            account: Who signs transactions; None: only calls.
            chain: Id of the chain that the server must be of; None: of any.
            fee: Wei that the fee of a transaction may reach.

        Raises:
            SettlementError: `address` is none.
        """
        if not Web3.is_address(address):
            raise SettlementError(f"{address}: not a contract's address, 40 hex digits after 0x")
        self.web3, self.account, self.fee = web3, account, fee
        self._chain = chain
        self.address = Web3.to_checksum_address(address)
        self._contract = web3.eth.contract(address=self.address, abi=load_artifact().abi)

    @property
    def abi(self) -> list[dict[str, Any]]:
        """The contract's interface."""
        return load_artifact().abi

    @property
    def domain(self) -> Domain:
        """The domain of messages to this contract. Raises `SettlementError` like `chain`."""
        return Domain(self.chain, self.address)

    @property
    def chain(self) -> int:
        """Id of the chain (EIP-155).

        Raises `SettlementError` if the RPC server fails, or is of another chain than the expected
        one. Nothing may be signed for that.
        """
        found = chain_of(self.web3)
        if self._chain not in (None, found):
            raise SettlementError(
                f"the chain's server is of chain {found}, the run of chain {self._chain}: name "
                "another server"
            )
        return found

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function without a transaction; return its result.

        Raises `SettlementError` if the RPC server fails, or the contract refuses.
        """
        with one_line(name):
            return self._contract.functions[name](*arguments).call()

    def waiting(self) -> int:
        """Return how many transactions of the account are sent, but not in a block.

        Raises `SettlementError` like `call`.
        """
        assert self.account is not None
        with one_line("transactions"):
            count = self.web3.eth.get_transaction_count
            in_blocks = int(count(self.account.address, "latest"))
            return max(0, int(count(self.account.address, "pending")) - in_blocks)

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
            SettlementError: The RPC server fails or is of another chain, the contract refuses,
                the fee is too high or cannot be paid, or no block has the transaction in time.
        """
        chain = self.chain
        with one_line(name):
            function = self._contract.functions[name](*arguments)
            base = {"value": value, "chainId": chain}
            return transact(self.web3, self._signing(), function, base, keep, self.fee)

    def events(self, name: str, run: bytes, first: int = 0) -> list[dict[str, Any]]:
        """Return the arguments of all events of a run, from block `first`, in order.

        Raises `SettlementError` if the RPC server fails.
        """
        event = self._contract.events[name]()
        pages = logs(event, name, {"run": run}, first, self.block())
        return [dict(each["args"]) for found in pages for each in found]

    def registered(self, run: bytes) -> int:
        """Return the number of the block in which a run was registered; 0 if no event says so.

        The newest blocks are asked for first. Raises `SettlementError` if the RPC server fails.
        """
        event = self._contract.events["Registered"]()
        pages = logs(event, "Registered", {"run": run}, 0, self.block(), newest=True)
        with one_line("Registered"):
            return next((int(page[-1]["blockNumber"]) for page in pages if page), 0)

    def code(self) -> bytes:
        """Return the code at the contract's address. Raises `SettlementError` like `call`."""
        with one_line("eth_getCode"):
            return bytes(self.web3.eth.get_code(self.address))

    def now(self) -> int:
        """Return the time of the newest block, seconds. Raises `SettlementError` like `call`."""
        with one_line("eth_getBlockByNumber"):
            return int(self.web3.eth.get_block("latest")["timestamp"])

    def block(self) -> int:
        """Return the number of the newest block. Raises `SettlementError` like `call`."""
        with one_line("eth_blockNumber"):
            return int(self.web3.eth.block_number)

    def _signing(self) -> LocalAccount:
        if self.account is None:
            raise SettlementError("no key: this needs an account that signs")
        return self.account


def deploy(web3: Web3, account: LocalAccount, keep: Keep | None = None, fee: int = FEE) -> Sent:
    """Deploy a `RunLedger`. Raises `SettlementError` like `Ledger.send`."""
    artifact = load_artifact()
    with one_line("deploy"):
        contract = web3.eth.contract(abi=artifact.abi, bytecode=artifact.bytecode)
        return transact(web3, account, contract.constructor(), {"value": 0}, keep, fee)


def logs(
    event: Any, what: str, filters: dict[str, Any], first: int, last: int, newest: bool = False
) -> Iterator[list[Any]]:
    """Iterate over the events of any contract in the blocks `first` to `last`, by request.

    Many servers answer only for a number of blocks. So a range that a server refuses is asked for
    in halves, down to `LEAST_BLOCKS`. A request that is refused yields an empty list, so that a
    caller can bound the number of requests.

    Args:
        event: A bound event of web3.
        what: The call, for messages.
        filters: Values of the event's indexed arguments.
        first: Number of the first block.
        last: Number of the last block; below `first`: there is none, and nothing is asked.
        newest: Begin with the newest range, not with the oldest. Within a range the order is that
            of the chain.

    Raises:
        SettlementError: The RPC server fails, or refuses the smallest range.
    """
    step = last - first + 1
    while first <= last:
        begin = max(first, last - step + 1) if newest else first
        end = last if newest else min(last, first + step - 1)
        found: list[Any] = []
        try:
            with one_line(what):
                found += event.get_logs(from_block=begin, to_block=end, argument_filters=filters)
            first, last = (first, begin - 1) if newest else (end + 1, last)
        except RefusedError:
            if step <= LEAST_BLOCKS:
                raise
            step = max(LEAST_BLOCKS, step // 2)
        yield found


def coins(wei: int) -> str:
    """Return wei as coins."""
    return f"{Web3.from_wei(wei, 'ether'):f} coins"


def run_id(owner: str, log: str) -> bytes:
    """Return a run's id in a ledger. `owner`: address; `log`: id of the run's log, 64 hex."""
    padded = bytes(12) + bytes.fromhex(owner.removeprefix("0x"))
    return bytes(keccak(padded + bytes.fromhex(log)))


def transact(
    web3: Web3, account: LocalAccount, call: Any, base: dict[str, Any], keep: Keep | None, fee: int
) -> Sent:
    """Sign and send a call of any contract; wait until it is in a block.

    Args:
        web3: Connection to an RPC server.
        account: Who signs.
        call: A bound function or constructor of web3.
        base: Fields of the transaction, `value` among them.
        keep: Keeps the signed transaction before it is sent.
        fee: Wei that the fee may reach.

    Raises:
        SettlementError: The fee is too high, or the account cannot pay it, or the transaction has
            no effect. Errors of web3 are raised as they are (`one_line`).
    """
    base = {
        **base,
        "from": account.address,
        "nonce": web3.eth.get_transaction_count(account.address, "pending"),
    }
    built = call.build_transaction(base)
    most = built["gas"] * built.get("maxFeePerGas", built.get("gasPrice", 0))
    check_fee(most, fee)
    check_balance(web3, account.address, built["value"] + most)
    signed = account.sign_transaction(built)
    if keep is not None:
        keep(bytes(signed.hash), bytes(signed.raw_transaction))
    push(web3, signed.hash, signed.raw_transaction)
    return _received(web3, signed.hash)


def check_fee(most: int, limit: int) -> None:
    """Raise `SettlementError` if a fee could reach `most` wei, and that is above `limit`."""
    if most > limit:
        raise SettlementError(
            f"the fee of a transaction could reach {coins(most)}, more than {coins(limit)}: the "
            "chain's server says so; wait, or allow it with --most-fee"
        )


def check_balance(web3: Web3, account: str, most: int) -> None:
    """Raise `SettlementError` if an account holds less than `most` wei, payment and fee together.

    Servers refuse such a transaction. Once kept, it would hold up every later one.
    """
    held = int(web3.eth.get_balance(Web3.to_checksum_address(account)))
    if held < most:
        raise SettlementError(
            f"{account}: holds {coins(held)}, and a payment with its fee could reach "
            f"{coins(most)}: nothing was sent; pay the difference to this account"
        )


def push(web3: Web3, hash_: bytes, signed: bytes) -> None:
    """Send a signed transaction, unless the server has it."""
    try:
        web3.eth.send_raw_transaction(signed)
    except Web3RPCError as error:
        if any(part in str(error).lower() for part in KNOWN):
            return
        try:
            web3.eth.get_transaction(HexBytes(hash_))
        except TransactionNotFound:
            raise error from None


def _received(web3: Web3, hash_: bytes) -> Sent:
    receipt = web3.eth.wait_for_transaction_receipt(HexBytes(hash_), timeout=PATIENCE)
    return sent_by(hash_, receipt)


def sent_by(hash_: bytes, receipt: Any) -> Sent:
    """Return what a receipt says. Raises `RevertedError` if the transaction has no effect."""
    if receipt["status"] != 1:
        raise RevertedError(f"transaction 0x{hash_.hex()}", "in its block", "the chain")
    return Sent("0x" + hash_.hex(), receipt["gasUsed"], receipt["contractAddress"])


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turn errors of the chain into one line that names the call."""
    try:
        yield
    except ContractCustomError as error:
        raise RefusedError(what, _error_name(str(error.data))) from None
    except (ContractLogicError, Web3RPCError) as error:
        raise RefusedError(what, _shown(error), "the chain") from None
    except (Web3Exception, RequestException, OSError, ValueError) as error:
        raise ServerFailedError(f"{what}: the chain's server failed: {_shown(error)}") from None
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # web3 looks into answers before it checks them.
        kind = type(error).__name__
        raise ServerFailedError(
            f"{what}: the chain's server failed: its answer cannot be used ({kind}: "
            f"{_shown(error)})"
        ) from None


def _shown(error: Exception) -> str:
    """Return an error as one line. Of URLs, whose paths may be secret, only the hosts stay."""
    text = hide_secrets(" ".join(str(error).split()))
    text = re.sub(r"\w+://[^\s'\"<>)]+", lambda found: host_of(found[0]), text)
    return re.sub(r"( with)? url: /\S*", "", text)[:300]


class ServerFailedError(SettlementError):
    """The chain's server gives no answer, or one that cannot be used."""


class RefusedError(SettlementError):
    """The contract, or the chain's server, has refused a call."""

    permanent = True

    def __init__(self, call: str, reason: str, by: str = "RunLedger") -> None:
        super().__init__(f"{call}: {by} refuses: {reason}")
        self.reason = reason
        """Name of the contract's error."""


class RevertedError(RefusedError):
    """A transaction is in a block, and has had no effect."""


def _error_name(data: str) -> str:
    """Return the name of the contract's error whose encoding is `data`."""
    known = {
        "0x" + function_abi_to_4byte_selector(each).hex(): str(each["name"])
        for each in load_artifact().abi
        if each["type"] == "error"
    }
    return known.get(data[:10], data[:10])
