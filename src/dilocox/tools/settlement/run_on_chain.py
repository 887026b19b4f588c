"""Where a run is on a chain: `settlement/chain.json` of its folder, a public file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eth_account.signers.local import LocalAccount
from web3 import Web3

from dilocox.coordinator.identity import write_private
from dilocox.errors import SettlementError
from dilocox.tools.settlement.contract_code import check_code
from dilocox.tools.settlement.journal import Journal
from dilocox.tools.settlement.ledger import (
    Ledger,
    Sent,
    connect,
    public_part,
    run_id,
)
from dilocox.tools.settlement.limits import FEE
from dilocox.tools.settlement.signed_roots import SignedRoots
from dilocox.utils.storage import overwrite

FOLDER, FILE, RPC = "settlement", "chain.json", "rpc.url"
"""`RPC`: a file of mode 600 with the whole URL of an RPC server, if that holds a secret."""


@dataclass(frozen=True)
class RunOnChain:
    """A registered run."""

    rpc: str
    """URL of an RPC server of the chain."""
    chain: int
    """Id of the chain (EIP-155)."""
    contract: str
    """Address of the `RunLedger`."""
    owner: str
    """Address of the account that registered the run."""
    log: str
    """Id of the run's log, 64 hex digits."""
    block: int
    """The block in which the run was registered, or one before; its events are looked up from
    there."""
    auditors: tuple[str, ...]
    """Addresses of the auditors. The contract keeps only their Merkle root."""

    @property
    def run(self) -> bytes:
        """The run's id in the contract."""
        return run_id(self.owner, self.log)

    def write(self, folder: Path) -> Path:
        """Write the file below a run's folder; return it.

        Of an RPC server's URL it has only the public part. The whole one goes to a file of mode
        600 beside it. Raises `SettlementError`.
        """
        path = folder / FOLDER / FILE
        said = {**asdict(self), "rpc": public_part(self.rpc)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if said["rpc"] != self.rpc:
                write_private(path.with_name(RPC), f"{self.rpc}\n".encode())
            overwrite(path, json.dumps(said, indent=1) + "\n")
        except OSError as error:
            raise SettlementError(f"{path}: cannot be written ({error.strerror})") from None
        return path

    @classmethod
    def read(cls, place: Path) -> RunOnChain:
        """Read the file, or the file of a run's folder.

        Raises `SettlementError` if it is missing or malformed, or cannot be read.
        """
        path = place / FOLDER / FILE if place.is_dir() else place
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**{name: said[name] for name in cls.__dataclass_fields__})
            _check(found)
            private = path.with_name(RPC)
            rpc = private.read_text(encoding="utf-8").strip() if private.exists() else found.rpc
            return replace(found, rpc=rpc, auditors=tuple(map(str, found.auditors)))
        except FileNotFoundError:
            raise SettlementError(
                f"{path}: missing; dilocox chain register writes it, copy it from there"
            ) from None
        except OSError as error:
            reason = error.strerror
            raise SettlementError(f"{error.filename or path}: cannot be read ({reason})") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SettlementError(f"{path}: not a file of dilocox chain register") from None

    def ledger(self, account: LocalAccount | None = None, fee: int = FEE) -> Ledger:
        """Return the contract, as one account sees it. It is not called.

        `fee`: wei that the fee of a transaction may reach. Raises `SettlementError` if the file's
        contract is no address.
        """
        return Ledger(connect(self.rpc), self.contract, account, self.chain, fee)


def _check(run: RunOnChain) -> None:
    """Raise `ValueError` or `TypeError` unless all fields have the form that `register` writes."""
    numbers = (run.chain, run.block)
    if any(type(each) is not int or each < 0 for each in numbers) or type(run.rpc) is not str:
        raise ValueError("chain, block or rpc")
    if type(run.auditors) not in (list, tuple) or not run.auditors:
        raise ValueError("auditors")
    if not all(Web3.is_address(each) for each in (run.owner, run.contract, *run.auditors)):
        raise ValueError("an address")
    if len(bytes.fromhex(run.log)) != 32:
        raise ValueError("log")


def read_rpc(given: str) -> str:
    """Return the URL of an RPC server: `given`, or the first line of the file of this name.

    A URL's path may be a key, which has no place on a command line. So the file must be of mode
    600. Raises `SettlementError` if others can read the file, or if it cannot be read.
    """
    path = Path(given)
    if "://" in given or not path.is_file():
        return given
    try:
        if path.stat().st_mode & 0o077:
            raise SettlementError(f"{path}: other users can read this URL: chmod 600 {path}")
        return path.read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettlementError(f"{path}: cannot be read ({error})") from None


class Desk:
    """Sends transactions of one account, each once, also after a crash."""

    def __init__(self, ledger: Ledger, folder: Path, signed: Path | None = None) -> None:
        """Look after an account. Nothing is sent.

        Args:
            ledger: The contract, seen by the account.
            folder: Where the account's journal lies, the `settlement` folder of a run.
            signed: File of the roots that the account has signed, beside its key; None: `folder`
                has it, so the account must not sign in another one.

        Raises:
            SettlementError: The ledger has no account.
        """
        if ledger.account is None:
            raise SettlementError("no key: this needs an account that signs")
        self.ledger, self.account = ledger, ledger.account
        self.finished: list[str] = []
        """Functions that a crash had left open, and that `opened` has finished."""
        self.journal = Journal(folder / f"journal-{ledger.account.address}.jsonl")
        self.signed = SignedRoots(signed or folder / f"signed-{ledger.account.address}.jsonl")

    @contextlib.contextmanager
    def opened(self) -> Iterator[Desk]:
        """Hold the account's journal, and finish what a crash has left open.

        Raises `SettlementError` if the contract is another one than `RunLedger`, or if the chain's
        server fails.
        """
        check_code(self.ledger)
        with self.journal.only_here():
            finished = self.journal.catch_up(self.ledger.web3, self.account, self.ledger.fee)
            self.finished = [each.function for each in finished]
            yield self

    def send(self, name: str, *arguments: Any, value: int = 0) -> Sent:
        """Send one transaction; see `Ledger.send`."""
        sent = self.ledger.send(name, *arguments, value=value, keep=self.journal.keep)
        self.journal.done(sent.hash)
        return sent

    def sign_once(
        self, run: RunOnChain, path: Path, kind: str, roots: Mapping[int, bytes]
    ) -> tuple[int, list[int]]:
        """Sign roots of a run, and append them to a public file; see `SignedRoots.sign_once`."""
        domain = self.ledger.domain
        return self.signed.sign_once(self.account, domain, run.run, path, kind, roots)
