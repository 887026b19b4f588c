"""Transactions of one account that were signed and perhaps not yet in a block.

A transaction is written down before it is sent. After a crash the same transaction is sent again:
its number (nonce) lets it count once. The journal holds no secret, only signed transactions.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eth_account.signers.local import LocalAccount
from web3 import Web3

from dilocox.errors import SettlementError
from dilocox.tools.settlement.ledger import RevertedError
from dilocox.tools.settlement.limits import FEE
from dilocox.tools.settlement.resending import Signed, send_again
from dilocox.utils.append_file import AppendFile


class Journal:
    """The journal of one account in one folder. One process at a time uses it."""

    def __init__(self, path: Path) -> None:
        """`path`: the journal's file; created with its folder at the first transaction."""
        self._path = path

    @contextlib.contextmanager
    def only_here(self) -> Iterator[None]:
        """Hold the journal; another process waits. Raises `SettlementError`."""
        with locked(self._path):
            yield

    def keep(self, hash_: bytes, signed: bytes) -> None:
        """Write a signed transaction down, so that it survives a power cut. Raises `OSError`."""
        self._append({"hash": hash_.hex(), "signed": signed.hex()})

    def done(self, hash_: str, contract: str | None = None, late: bool = False) -> None:
        """Write down that a transaction needs no more care. Raises `OSError`.

        Args:
            hash_: Its hash, hex.
            contract: Address of the contract that it has created.
            late: A later command has finished it; see `late`.
        """
        created = {} if contract is None else {"contract": contract}
        finished = {"late": True} if late else {}
        self._append({"done": hash_.removeprefix("0x"), **created, **finished})

    def catch_up(
        self, web3: Web3, account: LocalAccount, fee: int = FEE, whole: bool = False
    ) -> list[Signed]:
        """Send transactions again that a crash has left open, and wait for them.

        A transaction is done once a block has it, or another one of its number. Any other answer
        leaves it open: it may still come into a block.

        Args:
            web3: Connection to an RPC server.
            account: Who has signed them. It signs again where a fee has become too low.
            fee: Wei that the fee of a transaction may reach.
            whole: `fee` limits fee and value together.

        Returns:
            The transactions that were left open, and are now in a block with effect.

        Raises:
            SettlementError: The chain's server fails or refuses.
        """
        finished = []
        for number, group in self.groups().items():
            found = None
            limit = max(0, fee - group[-1].value) if whole else fee
            with contextlib.suppress(RevertedError):
                found = send_again(web3, account, group, self.keep, limit)
            if found is not None:
                self.done(found[0].hash.hex(), found[1].contract, late=True)
                finished.append(found[0])
            for each in self.groups().get(number, ()):
                self.done(each.hash.hex())
        return finished

    def groups(self) -> dict[int, list[Signed]]:
        """Return open transactions by their number, in ascending order; of one, the newest last.

        Raises `SettlementError` if the journal cannot be read.
        """
        found: dict[int, list[Signed]] = {}
        for hash_, text in self.open().items():
            each = Signed(bytes.fromhex(hash_), bytes.fromhex(text))
            found.setdefault(each.number, []).append(each)
        return dict(sorted(found.items()))

    def open(self) -> dict[str, str]:
        """Return signed transactions by hash, both hex, that are not done.

        Raises `SettlementError` if the journal cannot be read.
        """
        found: dict[str, str] = {}
        with readable(self._path, "journal"):
            for said in read_lines(self._path):
                if "done" in said:
                    found.pop(said["done"], None)
                else:
                    found[said["hash"]] = said["signed"]
        return found

    def late(self) -> list[Signed]:
        """Return transactions that `catch_up` has finished, and that `told` was not called with.

        The user may repeat the command that has signed one of them, and it must not sign another
        one. Raises `SettlementError` if the journal cannot be read.
        """
        found: set[str] = set()
        with readable(self._path, "journal"):
            for said in read_lines(self._path):
                if said.get("late"):
                    found.add(said["done"])
                elif said.get("told"):
                    found.discard(said["done"])
        return [each for each in self.sent() if each.hash.hex() in found]

    def told(self, late: Iterable[Signed]) -> None:
        """Write down that the user learns of these transactions of `late`. Raises `OSError`."""
        for each in late:
            self._append({"done": each.hash.hex(), "told": True})

    def sent(self) -> list[Signed]:
        """Return all transactions of the journal, the newest last, whatever became of them.

        Raises `SettlementError` if the journal cannot be read.
        """
        with readable(self._path, "journal"):
            lines = [said for said in read_lines(self._path) if "signed" in said]
            return [Signed(*map(bytes.fromhex, (said["hash"], said["signed"]))) for said in lines]

    def contracts(self) -> list[str]:
        """Return addresses of contracts that the account has created, the newest last.

        Raises `SettlementError` if the journal cannot be read.
        """
        with readable(self._path, "journal"):
            return [said["contract"] for said in read_lines(self._path) if "contract" in said]

    def _append(self, said: dict[str, Any]) -> None:
        append_lines(self._path, [said])


@contextlib.contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Raise `SettlementError` in place of what a damaged or unreadable file leads to.

    `kind`: what the file should be, for the message.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettlementError(f"{path}: not a {kind} ({error})") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file by a lock beside it; another process waits. Its folder is created.

    Raises `SettlementError` in place of an `OSError`, also one of the block.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise SettlementError(f"{path}: cannot be used ({error.strerror})") from None


def read_lines(path: Path) -> list[Any]:
    """Return the JSON lines of a file; none if it is missing.

    A last line without an end was cut short by a crash, and does not count. Raises `OSError`, and
    `ValueError` for what is no JSON.
    """
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines to a file so that they survive a power cut. Raises `OSError`.

    A last line that a crash has cut short is removed.
    """
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
    file = AppendFile(path, durable=True)
    try:
        file.append(b"".join(json.dumps(each).encode() + b"\n" for each in lines))
        file.sync()
    finally:
        file.close()
