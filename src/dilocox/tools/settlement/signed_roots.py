"""Signs roots of heads and of commitments, and never two of one place.

Two roots of one size or round cost the stake. So an account remembers beside its key what it has
signed, and not only in the run's folder, which may be a newer copy of the record, or an older one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eth_account.signers.local import LocalAccount

from dilocox.errors import SettlementError
from dilocox.tools.settlement.journal import append_lines, locked, read_lines, readable
from dilocox.tools.settlement.messages import Domain

KIND = "file of signed roots"
PLACES = {"Head": "size", "Commit": "round"}
"""By type of message: its field beside the root."""


class SignedRoots:
    """The roots that one account has signed on one chain, in all folders."""

    def __init__(self, path: Path) -> None:
        """`path`: the file, JSON lines, beside the account's key; created at the first root."""
        self._path = path

    def sign_once(
        self, account: LocalAccount, domain: Domain, run: bytes, path: Path, kind: str,
        roots: Mapping[int, bytes],
    ) -> tuple[int, list[int]]:  # fmt: skip
        """Sign a message for each root, and append it to a public file, each once.

        Args:
            account: Who signs.
            domain: The contract.
            run: The run's id in the contract.
            path: The public file, JSON lines. It gets the roots that it lacks, also those that
                were signed in another folder.
            kind: Type of the message, one of `PLACES`.
            roots: Root by size or round.

        Returns:
            The number of roots that are signed for the first time; and the sizes or rounds of
            which another root was signed before. For these nothing is signed.

        Raises:
            SettlementError: A file cannot be read or written.
        """
        name = PLACES[kind]
        with locked(self._path):
            public, before = _public(path, name), self._known(domain.contract, run, name)
            wanted = {number: root.hex() for number, root in sorted(roots.items())}
            changed = [
                number for number, root in wanted.items()
                if {before.get(number, root), public.get(number, root)} != {root}
            ]  # fmt: skip
            kept = {number: root for number, root in wanted.items() if number not in changed}
            place = {"contract": domain.contract, "run": run.hex()}
            # First beside the key: a root that a crash leaves there alone is signed next time.
            new = {number: root for number, root in kept.items() if number not in before}
            _append(self._path, [{**place, name: n, "root": root} for n, root in new.items()])
            lines = []
            for number, root in kept.items():
                if number not in public:
                    said = {"run": run, name: number, "root": bytes.fromhex(root)}
                    signature = domain.sign(account, kind, **said).hex()
                    lines.append({name: number, "root": root, "signature": signature})
            _append(path, lines)
        return len(new.keys() - public.keys()), changed

    def _known(self, contract: str, run: bytes, name: str) -> dict[int, str]:
        """Return the roots, hex, that were signed for a run, by size or round."""
        place = (contract.lower(), run.hex())
        with readable(self._path, KIND):
            return {
                int(each[name]): str(each["root"])
                for each in read_lines(self._path)
                if (str(each["contract"]).lower(), each["run"]) == place and name in each
            }


def _public(path: Path, name: str) -> dict[int, str]:
    """Return the roots, hex, of a public file, by size or round."""
    with readable(path, KIND):
        return {int(each[name]): str(each["root"]) for each in read_lines(path)}


def _append(path: Path, lines: list[dict[str, object]]) -> None:
    if not lines:
        return
    try:
        append_lines(path, lines)
    except OSError as error:
        raise SettlementError(f"{path}: cannot be written ({error.strerror})") from None
