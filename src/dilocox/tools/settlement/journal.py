"""Transactions of one account that were signed and perhaps not yet in a block.

A transaction is written down before it is sent. After a crash the same transaction is sent again:
its number (nonce) lets it count once. The journal holds no secret, only signed transactions.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

from web3 import Web3

from dilocox.errors import SettlementError
from dilocox.tools.settlement.ledger import send_again
from dilocox.utils.append_file import AppendFile


class Journal:
    """The journal of one account in one folder. One process at a time uses it."""

    def __init__(self, path: Path) -> None:
        """`path`: the journal's file; created with its folder at the first transaction."""
        self._path = path

    @contextlib.contextmanager
    def only_here(self) -> Iterator[None]:
        """Hold the journal; another process waits. Raises `SettlementError`."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise SettlementError(f"{self._path}: cannot be used ({error.strerror})") from None

    def keep(self, hash_: bytes, signed: bytes) -> None:
        """Write a signed transaction down, so that it survives a power cut. Raises `OSError`."""
        self._append({"hash": hash_.hex(), "signed": signed.hex()})

    def done(self, hash_: str) -> None:
        """Write down that a transaction needs no more care. Raises `OSError`."""
        self._append({"done": hash_.removeprefix("0x")})

    def catch_up(self, web3: Web3) -> None:
        """Send transactions again that a crash has left open, and wait for them.

        A transaction that the chain refuses now is done, too: the command that made it looks at
        the chain anew. Raises `SettlementError` if the chain's server fails.
        """
        for hash_, signed in self.open().items():
            try:
                send_again(web3, bytes.fromhex(hash_), bytes.fromhex(signed))
            except SettlementError as error:
                if not error.permanent:
                    raise
            self.done(hash_)

    def open(self) -> dict[str, str]:
        """Return signed transactions by hash, both hex, that are not done.

        Raises `SettlementError` if the journal cannot be read.
        """
        found: dict[str, str] = {}
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            # A last line without an end was cut short by a crash, before anything was sent.
            for line in text.splitlines(keepends=True):
                if line.endswith("\n"):
                    said = json.loads(line)
                    if "done" in said:
                        found.pop(said["done"], None)
                    else:
                        found[said["hash"]] = said["signed"]
        except (OSError, ValueError, KeyError) as error:
            raise SettlementError(f"{self._path}: not a journal ({error})") from None
        return found

    def _append(self, said: dict[str, str]) -> None:
        if self._path.exists():
            data = self._path.read_bytes()
            if not data.endswith(b"\n"):  # cut short by a crash, see `open`
                self._path.write_bytes(data[: data.rfind(b"\n") + 1])
        file = AppendFile(self._path, durable=True)
        try:
            file.append(json.dumps(said).encode() + b"\n")
            file.sync()
        finally:
            file.close()
