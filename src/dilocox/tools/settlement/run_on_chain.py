"""Where a run is on a chain: `settlement/chain.json` of its folder, a public file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eth_account.signers.local import LocalAccount

from dilocox.errors import SettlementError
from dilocox.tools.settlement.journal import Journal
from dilocox.tools.settlement.ledger import Ledger, Sent, connect, run_id

FOLDER, FILE = "settlement", "chain.json"


@dataclass(frozen=True)
class RunOnChain:
    """A registered run."""

    rpc: str
    """URL of an RPC server of the chain."""
    contract: str
    """Address of the `RunLedger`."""
    owner: str
    """Address of the account that registered the run."""
    log: str
    """Id of the run's log, 64 hex digits."""
    block: int
    """A block before the run was registered; its events are looked up from there."""
    auditors: tuple[str, ...]
    """Addresses of the auditors. The contract keeps only their Merkle root."""

    @property
    def run(self) -> bytes:
        """The run's id in the contract."""
        return run_id(self.owner, self.log)

    def write(self, folder: Path) -> Path:
        """Write the file below a run's folder; return it. Raises `SettlementError`."""
        path = folder / FOLDER / FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SettlementError(f"{path}: cannot be written ({error.strerror})") from None
        return path

    @classmethod
    def read(cls, place: Path) -> RunOnChain:
        """Read the file, or the file of a run's folder.

        Raises `SettlementError` if it is missing or malformed.
        """
        path = place / FOLDER / FILE if place.is_dir() else place
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**{name: said[name] for name in cls.__dataclass_fields__})
            bytes.fromhex(found.log)
            return replace(found, auditors=tuple(map(str, found.auditors)))
        except FileNotFoundError:
            raise SettlementError(
                f"{path}: missing; dilocox chain register writes it, copy it from there"
            ) from None
        except (OSError, ValueError, KeyError, TypeError):
            raise SettlementError(f"{path}: not a file of dilocox chain register") from None

    def ledger(self, account: LocalAccount | None = None) -> Ledger:
        """Return the contract, as one account sees it. It is not called."""
        return Ledger(connect(self.rpc), self.contract, account)


class Desk:
    """Sends transactions of one account, each once, also after a crash."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        """`folder`: where the account's journal lies, the `settlement` folder of a run."""
        if ledger.account is None:
            raise SettlementError("no key: this needs an account that signs")
        self.ledger, self.account = ledger, ledger.account
        self.journal = Journal(folder / f"journal-{ledger.account.address}.jsonl")

    @contextlib.contextmanager
    def opened(self) -> Iterator[Desk]:
        """Hold the account's journal, and finish what a crash has left open.

        Raises `SettlementError` if the chain's server fails.
        """
        with self.journal.only_here():
            self.journal.catch_up(self.ledger.web3)
            yield self

    def send(self, name: str, *arguments: Any, value: int = 0) -> Sent:
        """Send one transaction; see `Ledger.send`."""
        sent = self.ledger.send(name, *arguments, value=value, keep=self.journal.keep)
        self.journal.done(sent.hash)
        return sent
