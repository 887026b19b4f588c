"""Commitments that sites sign, and disputes: by signatures alone, or by a quorum of auditors.

Auditors vote with one shared file. Each adds a signature to it; the one who completes the quorum
sends the transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilocox.errors import SettlementError
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import paths_of, read
from dilocox.record.log.merkle import leaf_hash, root_of
from dilocox.record.log.transparency_log import read_text
from dilocox.tools.settlement.amounts import covered, read_prefix, terms_of
from dilocox.tools.settlement.claims_tree import AuditorsTree, ClaimsTree
from dilocox.tools.settlement.ledger import RefusedError
from dilocox.tools.settlement.run_on_chain import FOLDER, Desk, RunOnChain
from dilocox.tools.settlement.settling import checked, known_run, owed_at, sign_once

KINDS = {"size": ("Head", "slashForked"), "round": ("Commit", "slashEquivocated")}
"""By the field of a signed line beside its root: type of message, and function that slashes."""


def commit(desk: Desk, run: RunOnChain, folder: Path, site: str) -> list[str]:
    """Sign the site's commitments of every finished round, each round once.

    Raises `SettlementError` if another root of a round was signed, and `RecordError` if the log
    cannot be read.
    """
    roots = commitment_roots(covered(folder).entries, site)
    path = folder / FOLDER / f"commits-{site}.jsonl"
    with desk.journal.only_here():
        new = sign_once(desk, run, path, "Commit", "round", roots)
    return [f"{path}: {len(roots)} rounds, {new} of them new"]


def commitment_roots(entries: Any, site: str) -> dict[int, bytes]:
    """Return, by finished round, the RFC 6962 root over a site's `commitment` statements. Pure.

    The statements are sorted, so that the order of the log, which is the coordinator's word, does
    not matter. A round is finished if the log has commitments to a later one.
    """
    found: dict[int, set[str]] = {}
    newest = 0
    for entry in entries:
        statement, _ = s.opened(entry)
        if statement.kind == s.COMMITMENT:
            number = int(statement.predicate["round"])
            newest = max(newest, number)
            if statement.predicate["site"] == site:
                found.setdefault(number, set()).add(entry)
    return {
        number: root_of([leaf_hash(each.encode()) for each in sorted(own)])
        for number, own in found.items()
        if number < newest
    }


def slash_by_signatures(desk: Desk, run: RunOnChain, one: Path, other: Path) -> list[str]:
    """Slash who has signed two roots in one place, by two files of signed heads or commitments.

    Raises `SettlementError` if the files do not contradict each other, or the chain refuses.
    """
    first, second = _signed(one), _signed(other)
    for (name, number), line in first.items():
        against = second.get((name, number))
        if against is None or against["root"] == line["root"]:
            continue
        pairs = [
            part
            for each in (line, against)
            for part in (bytes.fromhex(each["root"]), bytes.fromhex(each["signature"]))
        ]
        _, function = KINDS[name]
        with desk.opened():
            return _slash(desk, f"{name} {number}", function, run.run, number, *pairs)
    raise SettlementError(f"{one} and {other}: no two roots of one round or size; nothing to slash")


def _signed(path: Path) -> dict[tuple[str, int], Mapping[str, str]]:
    found: dict[tuple[str, int], Mapping[str, str]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            (name,) = KINDS.keys() & said.keys()
            found[name, int(said[name])] = {key: str(said[key]) for key in ("root", "signature")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettlementError(f"{path}: not a file of signed heads or commits ({error})") from None
    return found


def veto(desk: Desk, run: RunOnChain, folder: Path, votes: Path) -> list[str]:
    """Vote against the pending settlement, if it is not what this log gives.

    Raises `SettlementError` if there is none, if it is right, or if the chain refuses.
    """
    with desk.opened():
        state = known_run(desk.ledger, run)
        pending, number = state["pending"], state["settlements"]
        if not int.from_bytes(pending):
            raise SettlementError("no settlement is pending: nothing to veto")
        settled = desk.ledger.events("Settled", run.run, run.block)[-1]
        heads = {e["size"]: e["root"] for e in desk.ledger.events("Anchored", run.run, run.block)}
        size = settled["size"]
        owed = owed_at(folder, size, heads[size])
        if owed and ClaimsTree(run.run, owed).root == pending:
            raise SettlementError(
                f"settlement {number} is what the log's first {size} statements give: no veto"
            )
        said = {"settlement": number, "claimsRoot": pending}
        gathered = _vote(desk, run, votes, "Veto", said)
        if len(gathered) < state["quorum"]:
            return [f"{votes}: {len(gathered)} of {state['quorum']} votes"]
        sent = desk.send("veto", run.run, number, gathered)
        return [f"vetoed settlement {number}; {sent.gas} gas"]


def mismatch(
    desk: Desk, run: RunOnChain, folder: Path, site: str, round_: int, votes: Path
) -> list[str]:
    """Vote to slash a site for a round that was found not to be what the site had signed.

    The tenth of the stake goes to the account that votes first.

    Raises `SettlementError` without a MISMATCH of the site's own determinism class in this folder,
    or if the chain refuses; `RecordError` if the record cannot be read.
    """
    course = read_prefix(folder).course
    account = terms_of(course)["accounts"].get(site)
    if account is None:
        raise SettlementError(f"site {site}: the run file names no account of it")
    evidence = _evidence(folder, course.run, site, round_)
    with desk.opened():
        state = known_run(desk.ledger, run)
        said = {
            "site": checked(account), "round": round_, "evidence": evidence,
            "challenger": _challenger(votes, desk.account.address),
        }  # fmt: skip
        gathered = _vote(desk, run, votes, "Mismatch", said)
        if len(gathered) < state["quorum"]:
            return [f"{votes}: {len(gathered)} of {state['quorum']} votes"]
        what = f"{site}, round {round_}"
        return _slash(desk, what, "slashMismatch", run.run, *said.values(), gathered)


def _evidence(folder: Path, run: str, site: str, round_: int) -> bytes:
    """Return the SHA-256 over the lines of the verdicts MISMATCH on a round, sorted.

    A difference between determinism classes is no evidence.
    """
    lines = []
    for path in paths_of(folder):
        found = read(path, run).verdict
        named = (found.site, found.round, found.verdict) == (site, round_, "MISMATCH")
        if named and found.same_class:
            lines.append(read_text(path).strip())
    if not lines:
        raise SettlementError(
            f"round {round_} of {site}: no verdict MISMATCH of the site's own determinism class "
            "in record/audits, so nothing is a reason to slash"
        )
    return hashlib.sha256("\n".join(sorted(lines)).encode()).digest()


def _slash(desk: Desk, what: str, function: str, *arguments: Any) -> list[str]:
    try:
        sent = desk.send(function, *arguments)
    except RefusedError as error:
        if error.reason == "AlreadyPunished":
            return [f"{what}: punished already"]
        raise
    return [f"{what}: slashed; {sent.gas} gas"]


def _challenger(votes: Path, own: str) -> str:
    """Return the account that the first vote names; without one, `own`."""
    return str(_read_votes(votes).get("values", {}).get("challenger", own))


def _vote(
    desk: Desk, run: RunOnChain, path: Path, kind: str, values: Mapping[str, Any]
) -> list[tuple[bytes, list[bytes]]]:
    """Add the account's vote to a file; return all its votes in the order of the contract.

    Raises `SettlementError` if the account is no auditor, or if the file is about another message.
    """
    tree = AuditorsTree(run.auditors)
    own = desk.account.address
    if own not in map(checked, run.auditors):
        raise SettlementError(f"{own} is not one of the run's auditors")
    plain = {key: f"0x{each.hex()}" if isinstance(each, bytes) else each
             for key, each in values.items()}  # fmt: skip
    said = _read_votes(path) or {"kind": kind, "values": plain, "votes": {}}
    if (said["kind"], said["values"]) != (kind, plain):
        raise SettlementError(f"{path}: its votes are about something else; name another file")
    domain, message = desk.ledger.domain, {"run": run.run, **values}
    said["votes"][own] = domain.sign(desk.account, kind, **message).hex()
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    gathered = []
    for address, text in sorted(said["votes"].items(), key=lambda pair: int(pair[0], 16)):
        signature = bytes.fromhex(text)
        if domain.signer(signature, kind, **message) != address:
            raise SettlementError(f"{path}: the vote of {address} is not signed by it")
        gathered.append((signature, tree.proof(address)))
    return gathered


def _read_votes(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"kind", "values", "votes"} <= said.keys():
            raise ValueError("fields are missing")
        return said
    except (OSError, ValueError, AttributeError) as error:
        raise SettlementError(f"{path}: not a file of votes ({error})") from None
