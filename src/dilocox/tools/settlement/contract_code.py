"""Compares a contract's code with the one that comes with this dilocox.

The check finds a wrong or foreign address before a payment or a signature. It believes the chain's
server, like every other call.
"""

from __future__ import annotations

from eth_abi.abi import encode
from eth_utils.crypto import keccak

from dilocox.errors import SettlementError
from dilocox.tools.settlement.artifact import load_artifact
from dilocox.tools.settlement.ledger import Ledger
from dilocox.tools.settlement.messages import NAME, VERSION

_DOMAIN = b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"


def check_code(ledger: Ledger) -> None:
    """Raise `SettlementError` unless the contract is the `RunLedger` of this dilocox.

    Raises `SettlementError` as well if the chain's server fails.
    """
    found = ledger.code()
    if not found:
        raise SettlementError(
            f"{ledger.address}: no contract on chain {ledger.chain}: compare the address with the "
            "run's owner"
        )
    if found != expected_code(ledger.chain, ledger.address):
        raise SettlementError(
            f"{ledger.address}: not the contract RunLedger of this dilocox, so nothing is sent to "
            "it: compare the address with the run's owner, or use the dilocox that deployed it"
        )


def expected_code(chain: int, address: str) -> bytes:
    """Return the code of a `RunLedger` at `address` on a chain. Pure.

    The constructor writes the contract's own EIP-712 domain into the code (OpenZeppelin's
    `EIP712`). So a contract whose messages would count elsewhere has other code.
    """
    artifact = load_artifact()
    name, version = bytes(keccak(text=NAME)), bytes(keccak(text=VERSION))
    domain = (bytes(keccak(_DOMAIN)), name, version, chain, address)
    types = ("bytes32", "bytes32", "bytes32", "uint256", "address")
    values = {
        "_cachedDomainSeparator": bytes(keccak(encode(types, domain))),
        "_cachedChainId": encode(["uint256"], [chain]),
        "_cachedThis": encode(["address"], [address]),
        "_hashedName": name,
        "_hashedVersion": version,
        "_name": _short(NAME),
        "_version": _short(VERSION),
    }
    code = bytearray.fromhex(artifact.runtime.removeprefix("0x"))
    for variable, places in artifact.immutables.items():
        for place in places:
            code[place : place + 32] = values[variable]
    return bytes(code)


def _short(text: str) -> bytes:
    """Return a text below 32 bytes as OpenZeppelin's `ShortString`: its bytes, then its length."""
    data = text.encode()
    return data.ljust(31, b"\0") + bytes([len(data)])
