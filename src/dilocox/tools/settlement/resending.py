"""Sends transactions again that a crash, or a fee that was too low, has left without a block.

All transactions of one number (nonce) together count once. So a transaction whose fee has become
too low is replaced by one of the same number and a higher fee.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlp
from eth_account.signers.local import LocalAccount
from eth_utils.abi import function_abi_to_4byte_selector
from hexbytes import HexBytes
from web3 import Web3
from web3.exceptions import TimeExhausted, TransactionNotFound

from dilocox.tools.settlement.artifact import load_artifact
from dilocox.tools.settlement.ledger import (
    PATIENCE,
    Keep,
    Sent,
    check_fee,
    coins,
    one_line,
    push,
    sent_by,
)

POLL = 0.2
"""Seconds between two looks for a receipt."""


@dataclass(frozen=True)
class Signed:
    """A signed transaction."""

    hash: bytes
    raw: bytes

    @property
    def number(self) -> int:
        """Its number among those of its account (nonce)."""
        return int.from_bytes(self._fields[1 if self._typed else 0])

    @property
    def value(self) -> int:
        """Wei that it pays to its receiver."""
        return int.from_bytes(self._fields[6 if self._typed else 4])

    @property
    def data(self) -> bytes:
        """Its data: a call of a function, or a constructor."""
        return bytes(self._fields[7 if self._typed else 5])

    @property
    def function(self) -> str:
        """Name of the contract's function that it calls, or nothing."""
        names = {
            function_abi_to_4byte_selector(each): str(each["name"])
            for each in load_artifact().abi
            if each["type"] == "function"
        }
        return names.get(self.data[:4], "")

    @property
    def text(self) -> str:
        """Its number, function and payment, for messages."""
        paid = f" of {coins(self.value)}" if self.value else ""
        return f"transaction number {self.number} ({self.function or 'a call'}{paid})"

    def higher(self, account: LocalAccount, base: int, tip: int, limit: int) -> Signed | None:
        """Return this transaction with a higher fee, signed; None if the fee is high enough. Pure.

        Servers take a replacement whose fees are a tenth higher; these are an eighth higher.

        Args:
            account: Who signs.
            base: Wei per gas that the newest block has burnt.
            tip: Wei per gas that its producer expects.
            limit: Wei that the fee may reach.

        Raises:
            SettlementError: The fee no longer pays what blocks burn, and a higher one would exceed
                the limit.
        """
        if not self._typed:
            return None
        before, most, gas = (int.from_bytes(self._fields[place]) for place in (2, 3, 4))
        if before >= tip and most >= base + tip:
            return None
        new_tip, new_most = _raised(before, most, base, tip)
        if most >= base + before and gas * new_most > limit:
            return None  # a block may still take it, though it pays less than others
        check_fee(gas * new_most, limit)
        to = bytes(self._fields[5])
        return self._resigned(account, new_tip, new_most, {
            "gas": gas, "value": self.value, "data": self.data,
            **({"to": Web3.to_checksum_address(to)} if to else {}),
        })  # fmt: skip

    def emptied(
        self, account: LocalAccount, gas: int, base: int, tip: int, limit: int
    ) -> Signed | None:
        """Return a transaction of this number that does nothing, with a higher fee, signed. Pure.

        Args:
            account: Who signs, and gets nothing from itself.
            gas: Gas of a payment on this chain.
            base: Wei per gas that the newest block has burnt.
            tip: Wei per gas that its producer expects.
            limit: Wei that the fee may reach.

        Returns:
            The transaction; None for one of before EIP-1559, which is not replaced.

        Raises:
            SettlementError: The fee would exceed the limit.
        """
        if not self._typed:
            return None
        before, most = (int.from_bytes(self._fields[place]) for place in (2, 3))
        new_tip, new_most = _raised(before, most, base, tip)
        check_fee(gas * new_most, limit)
        said = {"gas": gas, "value": 0, "data": b"", "to": account.address}
        return self._resigned(account, new_tip, new_most, said)

    @property
    def most(self) -> int:
        """Wei that it may take from the account: its payment and its highest fee."""
        price, gas = (3, 4) if self._typed else (1, 2)
        return self.value + int.from_bytes(self._fields[price]) * int.from_bytes(self._fields[gas])

    def _resigned(self, account: LocalAccount, tip: int, most: int, said: dict[str, Any]) -> Signed:
        signed = account.sign_transaction({
            "type": 2, "chainId": int.from_bytes(self._fields[0]), "nonce": self.number,
            "maxPriorityFeePerGas": tip, "maxFeePerGas": most, **said,
        })  # fmt: skip
        return Signed(bytes(signed.hash), bytes(signed.raw_transaction))

    @property
    def _typed(self) -> bool:
        """True for a transaction of EIP-1559; those before EIP-155 have no type."""
        return self.raw[0] < 0x80

    @property
    def _fields(self) -> Sequence[bytes]:
        found: Sequence[bytes] = rlp.decode(self.raw[1:] if self._typed else self.raw)
        return found


def _raised(before: int, most: int, base: int, tip: int) -> tuple[int, int]:
    """Return tip and highest fee of a replacement, wei per gas."""
    new_tip = max(tip, before * 9 // 8 + 1)
    return new_tip, max(2 * base + new_tip, most * 9 // 8 + 1)


def fees(web3: Web3) -> tuple[int, int]:
    """Return what the newest block has burnt and what its producer expects, wei per gas."""
    base = int(web3.eth.get_block("latest").get("baseFeePerGas", 0))
    return base, int(web3.eth.max_priority_fee)


def send_again(
    web3: Web3, account: LocalAccount, group: Sequence[Signed], keep: Keep, fee: int
) -> tuple[Signed, Sent] | None:
    """Send the newest of kept transactions of one number again; wait until a block has one.

    If a block has one already, nothing is sent. If the fee has become too low, a transaction with a
    higher fee is signed, kept and sent.

    Args:
        web3: Connection to an RPC server.
        account: Who has signed them.
        group: Transactions of one number, the newest last.
        keep: Keeps a transaction before it is sent.
        fee: Wei that the fee may reach.

    Returns:
        The transaction that a block has; None if a block has a strange one of this number.

    Raises:
        RevertedError: The transaction is in a block, without effect.
        SettlementError: The RPC server fails or refuses, or no block has it in time. It may be
            in a later block.
    """
    with one_line("send"):
        used = web3.eth.get_transaction_count(account.address, "latest")
        # Asked for after the number: a transaction that has used it has its receipt by now.
        found = _in_block(web3, group)
        if found is not None or used > group[-1].number:
            return found
        higher = group[-1].higher(account, *fees(web3), fee)
        # A replacement that the account cannot pay would be refused each time.
        if higher is not None and higher.most <= web3.eth.get_balance(account.address):
            keep(higher.hash, higher.raw)
            group = [*group, higher]
    with one_line(_stuck(group[0], used)):
        push(web3, group[-1].hash, group[-1].raw)
        end = time.monotonic() + PATIENCE
        while True:
            found = _in_block(web3, group)
            if found is not None:
                return found
            if time.monotonic() > end:
                raise TimeExhausted(f"no block has it after {PATIENCE:g} s; run this again")
            time.sleep(POLL)


def _stuck(first: Signed, used: int) -> str:
    """Return what waits for a block, for messages: the transaction, and what it waits for.

    `used`: number of the account's next transaction, as its newest block says.
    """
    gap = "" if used >= first.number else (
        f", which waits for number {used} of the account, sent by another folder or program"
    )  # fmt: skip
    drop = "; to drop it: dilocox chain cancel" if first.function else ""
    return f"{first.text}{gap}{drop}"


def _in_block(web3: Web3, group: Sequence[Signed]) -> tuple[Signed, Sent] | None:
    """Return the transaction of a group that a block has. Raises `RevertedError`."""
    for each in group:
        try:
            receipt = web3.eth.get_transaction_receipt(HexBytes(each.hash))
        except TransactionNotFound:
            continue
        return each, sent_by(each.hash, receipt)
    return None
