"""Messages that accounts sign for a `RunLedger` (EIP-712).

A message names the contract and its chain, so its signature counts nowhere else. It also names the
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eth_account import Account
from eth_account.messages import SignableMessage, encode_typed_data
from eth_account.signers.local import LocalAccount
from eth_keys.exceptions import BadSignature
from eth_utils.exceptions import ValidationError

from dilocox.errors import SettlementError

NAME, VERSION = "dilocox RunLedger", "1"
"""Name and version of the contract's EIP-712 domain."""
TYPES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Enrol": (("run", "bytes32"), ("ed25519Key", "bytes32"), ("expiry", "uint64")),
    "Commit": (("run", "bytes32"), ("round", "uint64"), ("root", "bytes32")),
    "Head": (("run", "bytes32"), ("size", "uint64"), ("root", "bytes32")),
    "Veto": (("run", "bytes32"), ("settlement", "uint64"), ("claimsRoot", "bytes32")),
    "Mismatch": (
        ("run", "bytes32"),
        ("site", "address"),
        ("round", "uint64"),
        ("evidence", "bytes32"),
        ("challenger", "address"),
    ),
}
"""Fields and Solidity types of each message.

Enrol: a site's account, for the key with which the site signs in the record; the contract does not
read it. Commit: a site's RFC 6962 root over its `commitment` statements of a round. Head: root of
the log's first `size` statements, by the owner. Veto and Mismatch: by auditors. Mismatch names who
gets the tenth of the stake.
"""


@dataclass(frozen=True)
class Domain:
    """A deployed `RunLedger`."""

    chain: int
    """Id of the chain (EIP-155)."""
    contract: str
    """Address, hex with 0x."""

    def sign(self, account: LocalAccount, kind: str, **values: Any) -> bytes:
        """Sign the message `kind` of `TYPES` with these fields; return 65 bytes."""
        return bytes(account.sign_message(self._message(kind, values)).signature)

    def signer(self, signature: bytes, kind: str, **values: Any) -> str:
        """Return the address that has signed a message.

        Raises `SettlementError` if the signature is malformed.
        """
        try:
            found = Account.recover_message(self._message(kind, values), signature=signature)
        except (BadSignature, ValidationError, ValueError, TypeError) as error:
            raise SettlementError(f"{kind}: not a signature of an account ({error})") from None
        return str(found)

    def _message(self, kind: str, values: Mapping[str, Any]) -> SignableMessage:
        domain = {
            "name": NAME,
            "version": VERSION,
            "chainId": self.chain,
            "verifyingContract": self.contract,
        }
        fields = [{"name": name, "type": type_} for name, type_ in TYPES[kind]]
        return encode_typed_data(domain, {kind: fields}, dict(values))
