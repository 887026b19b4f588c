"""Commitments that sites sign, and disputes: by signatures alone, or by a quorum of auditors.

Auditors vote with one shared file. Each adds a signature to it; the one who completes the quorum
sends the transaction.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError, SettlementError
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import paths_of
from dilocox.record.log.merkle import leaf_hash, root_of
from dilocox.record.log.step_statements import Step
from dilocox.record.log.verdict_statements import VerdictFile, read_file
from dilocox.record.verify.verdict_validity import not_replaced, still_standing
from dilocox.tools.settlement.amounts import LogPrefix, read_prefix, terms_of
from dilocox.tools.settlement.binding import check_log
from dilocox.tools.settlement.claims_tree import AuditorsTree
from dilocox.tools.settlement.contract_code import check_code
from dilocox.tools.settlement.ledger import RefusedError
from dilocox.tools.settlement.messages import Domain
from dilocox.tools.settlement.run_on_chain import FOLDER, Desk, RunOnChain
from dilocox.tools.settlement.settling import checked, known_run, settled_at
from dilocox.tools.settlement.veto_reasons import veto_reason
from dilocox.utils.json_lines import read_json_lines
from dilocox.utils.storage import overwrite

_ADDRESS = re.compile("0x[0-9a-fA-F]{40}")

KINDS = {"size": ("Head", "slashForked"), "round": ("Commit", "slashEquivocated")}
"""By the field of a signed line beside its root: type of message, and function that slashes."""


@dataclass(frozen=True)
class SignedLine:
    """A line of a file of signed heads or commitments."""

    name: str
    """Field beside the root: `size` or `round`."""
    number: int
    root: bytes
    signature: bytes


def commit(desk: Desk, run: RunOnChain, folder: Path, site: str) -> list[str]:
    """Sign the site's commitments of every finished round, each round once.

    A round whose commitments have changed since it was signed, in whichever folder, is named, and
    not signed again.

    Raises `SettlementError` if the account is not the site's alone, or the log not the run's, and
    `RecordError` if the log cannot be read, or is not what its key and the sites have signed.
    """
    prefix = read_prefix(folder)
    check_log(run, prefix.course.run, folder)
    _check_own(desk.account.address, terms_of(prefix.course)["accounts"], site)
    check_code(desk.ledger)
    roots = commitment_roots(prefix.entries, site, prefix.course.stages)
    path = folder / FOLDER / f"commits-{site}.jsonl"
    with desk.journal.only_here():
        new, changed = desk.sign_once(run, path, "Commit", roots)
    return [
        *(f"round {n}: another root was signed before; a second one would cost the stake, so the "
          "first one stands" for n in changed),
        f"{path}: {len(roots)} rounds, {new} of them new",
    ]  # fmt: skip


def _check_own(address: str, accounts: Mapping[str, str], site: str) -> None:
    """Raise `SettlementError` unless an address is the account of `site`, and of no other site.

    A signed commitment names no site. Two sites with one account would sign two roots of a round.
    """
    account = str(accounts.get(site, "")).lower()
    if not account:
        raise SettlementError(f"site {site}: the run file names no account of it")
    if account != address.lower():
        raise SettlementError(
            f"site {site}: its account is {accounts[site]}, but --key is of {address}"
        )
    others = [name for name, each in accounts.items() if name != site and each.lower() == account]
    if others:
        raise SettlementError(
            f"site {site}: has one account with {others[0]}, so its commitments would look like a "
            "second root of theirs and cost the stake; such sites cannot commit"
        )


def commitment_roots(entries: Iterable[str], site: str, stages: int) -> dict[int, bytes]:
    """Return, by finished round, the RFC 6962 root over a site's `commitment` statements. Pure.

    A round is finished by the outer step of its last exchange. Commitments after it do not count,
    so the root stays. The statements are sorted: their order in the log does not matter.

    Args:
        entries: The log's.
        site: Name of the site.
        stages: Pipeline stages of the run.
    """
    said: dict[int, set[str]] = {}
    steps: dict[str, Step] = {}
    found: dict[int, bytes] = {}
    for entry in entries:
        statement, _ = s.opened(entry)
        if statement.kind == s.COMMITMENT and statement.predicate["site"] == site:
            said.setdefault(int(statement.predicate["round"]), set()).add(entry)
        elif statement.kind == s.STEP:
            step = Step.of(statement)
            steps[step.key.text] = step
            number = step.key.round
            if number in said and _is_finished(steps, step, stages):
                leaves = [leaf_hash(each.encode()) for each in sorted(said[number])]
                found[number] = root_of(leaves)
        elif statement.kind == s.RESUME:
            tick = int(statement.predicate["tick"])
            for step in [each for each in steps.values() if each.tick > tick]:
                del steps[step.key.text]
                found.pop(step.key.round, None)
    return dict(sorted(found.items()))


def _is_finished(steps: Mapping[str, Step], step: Step, stages: int) -> bool:
    """Return True if all exchanges of a step's round have an outer step."""
    keys = (
        ExchangeKey.outer(step.key.round, stage, fragment).text
        for stage in range(stages)
        for fragment in range(step.fragments)
    )
    return all(key in steps for key in keys)


def slash_by_signatures(desk: Desk, run: RunOnChain, one: Path, other: Path) -> list[str]:
    """Slash who has signed two roots in one place, by files of signed heads or commitments.

    The two contradicting lines may be in one file. Lines that are malformed, or that others have
    signed, are passed over.

    Raises `SettlementError` if no two lines contradict each other, or the chain refuses.
    """
    lines = [*_lines(one), *_lines(other)]
    with desk.opened():
        owner = str(known_run(desk.ledger, run)["owner"])
        said: list[str] = []
        refused: SettlementError | None = None
        for first, second in contradictions(lines, desk.ledger.domain, run.run, owner):
            what, (_, function) = f"{first.name} {first.number}", KINDS[first.name]
            pair = (first.root, first.signature, second.root, second.signature)
            try:
                done = _slash(desk, what, function, run.run, first.number, *pair)
            except RefusedError as error:
                refused = refused or error
                continue
            said += done
            if "punished already" not in done[0]:
                return said
    if said:
        return said
    raise refused or SettlementError(
        f"{one} and {other}: no two roots of one round or size by one account; nothing to slash"
    )


def contradictions(
    lines: Iterable[SignedLine], domain: Domain, run: bytes, owner: str
) -> Iterator[tuple[SignedLine, SignedLine]]:
    """Yield two lines for each account and place with two signed roots. Heads count by the owner.

    Signers are recovered here, without the chain.
    """
    by_place: dict[tuple[str, int], list[SignedLine]] = {}
    for line in lines:
        by_place.setdefault((line.name, line.number), []).append(line)
    for (name, number), own in by_place.items():
        if len({line.root for line in own}) < 2:
            continue
        first: dict[str, SignedLine] = {}
        told: set[str] = set()
        for line in own:
            try:
                signer = domain.signer(
                    line.signature, KINDS[name][0], **{"run": run, name: number, "root": line.root}
                )
            except SettlementError:
                continue  # no signature: no evidence
            if name == "size" and signer.lower() != owner.lower():
                continue
            earlier = first.setdefault(signer, line)
            if earlier.root != line.root and signer not in told:
                told.add(signer)
                yield earlier, line


def _lines(path: Path) -> list[SignedLine]:
    """Read the well-formed lines of a file of signed heads or commitments; [] if it is missing.

    Raises `SettlementError` if the file cannot be read.
    """
    try:
        lines = read_json_lines(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SettlementError(f"{path}: cannot be read ({error.strerror})") from None
    found = []
    for line in lines:
        try:
            said = json.loads(line)
            (name,) = KINDS.keys() & said.keys()
            root, signature = bytes.fromhex(said["root"]), bytes.fromhex(said["signature"])
            number = int(said[name])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # somebody else's file: one bad line must not hide the others
        if len(root) == 32 and len(signature) == 65 and 0 <= number < 2**64:
            found.append(SignedLine(name, number, root, signature))
    return found


def veto(
    desk: Desk, run: RunOnChain, folder: Path, votes: Path, withheld: bool = False
) -> list[str]:
    """Vote against the pending settlement, if it is not what this log gives.

    Args:
        desk: The auditor's.
        run: The run.
        folder: A folder with the auditor's copy of the record.
        votes: File that the auditors hand on.
        withheld: Vote also if the copy is too short, because the owner withholds the log.

    Raises:
        SettlementError: No settlement is pending, or it is right, or the copy is too short to
            tell, or the chain refuses.
        RecordError: The copy is not what its key has signed.
    """
    with desk.opened():
        state = known_run(desk.ledger, run)
        pending, number = state["pending"], state["settlements"]
        if not int.from_bytes(pending):
            vetoed = desk.ledger.events("Vetoed", run.run, run.block)
            if number and number in [each["settlement"] for each in vetoed]:
                return [f"settlement {number}: vetoed already"]
            raise SettlementError("no settlement is pending: nothing to veto")
        head = settled_at(desk.ledger, run, pending)
        reason = veto_reason(run, folder, head, pending, withheld)
        if reason is None:
            raise SettlementError(
                f"settlement {number} is what the log's first {head[0]} statements give: no veto"
            )
        said = {"settlement": number, "claimsRoot": pending}
        gathered = _vote(desk, run, votes, "Veto", said)
        if len(gathered) < state["quorum"]:
            return [reason, f"{votes}: {len(gathered)} of {state['quorum']} votes"]
        sent = desk.send("veto", run.run, number, gathered)
        return [reason, f"vetoed settlement {number}; {sent.gas} gas"]


def mismatch(
    desk: Desk, run: RunOnChain, folder: Path, site: str, round_: int, votes: Path
) -> list[str]:
    """Vote to slash a site for a round that was found not to be what the site had signed.

    The tenth of the stake goes to the account that votes first. All votes name the evidence of the
    first one, but nobody votes without evidence in the own folder.

    Raises `SettlementError` without a MISMATCH of the site's own determinism class in this folder,
    or if the chain refuses; `RecordError` if the record cannot be read.
    """
    prefix = read_prefix(folder)
    check_log(run, prefix.course.run, folder)
    account = terms_of(prefix.course)["accounts"].get(site)
    if account is None:
        raise SettlementError(f"site {site}: the run file names no account of it")
    evidence = _evidence(folder, prefix, site, round_)
    first = _read_votes(votes).get("values", {})
    with desk.opened():
        state = known_run(desk.ledger, run)
        said = {
            "site": checked(account), "round": round_,
            "evidence": _digest(votes, first["evidence"]) if "evidence" in first else evidence,
            "challenger": checked(str(first.get("challenger", desk.account.address))),
        }  # fmt: skip
        gathered = _vote(desk, run, votes, "Mismatch", said)
        if len(gathered) < state["quorum"]:
            return [f"{votes}: {len(gathered)} of {state['quorum']} votes"]
        what = f"{site}, round {round_}"
        return _slash(desk, what, "slashMismatch", run.run, *said.values(), gathered)


def _evidence(folder: Path, prefix: LogPrefix, site: str, round_: int) -> bytes:
    """Return the SHA-256 over the lines of the verdicts MISMATCH on a round, sorted.

    Verdicts count of the run file's auditors, and on the present history. A verdict that its
    auditor has replaced does not count. A difference between determinism classes is no evidence.
    Files that are no verdict on this log are passed over: anybody may have put them there.
    """
    there, found, faults = list[VerdictFile](), set[str](), list[str]()
    for path in paths_of(folder):
        try:
            there.append(read_file(path, prefix.course.run))
        except RecordError as error:
            faults.append(f"; passed over: {error}")
    for file in not_replaced(prefix.course, there):
        signed = file.signed
        try:
            if (
                signed.auditor in terms_of(prefix.course)["auditors"]
                and (signed.verdict.site, signed.verdict.round) == (site, round_)
                and signed.verdict.verdict == "MISMATCH"
                and signed.verdict.same_class
                and still_standing(prefix.course, prefix.entries, [signed])
            ):
                found.add(file.line)
        except RecordError as error:
            faults.append(f"; passed over: {error}")
    if not found:
        raise SettlementError(
            f"round {round_} of {site}: no verdict MISMATCH of the site's own determinism class, "
            "by an auditor of the run file, in record/audits, so nothing is a reason to slash"
            f"{''.join(faults[:1])}"
        )
    return hashlib.sha256("\n".join(sorted(found)).encode()).digest()


def _digest(path: Path, text: Any) -> bytes:
    try:
        found = bytes.fromhex(str(text).removeprefix("0x"))
        if len(found) == 32:
            return found
    except ValueError:
        pass
    raise SettlementError(f"{path}: its evidence is not a SHA-256")


def _slash(desk: Desk, what: str, function: str, *arguments: Any) -> list[str]:
    try:
        sent = desk.send(function, *arguments)
    except RefusedError as error:
        if error.reason == "AlreadyPunished":
            return [f"{what}: punished already"]
        raise
    return [f"{what}: slashed; {sent.gas} gas"]


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
    challenger = values.get("challenger", own)
    if challenger not in said["votes"]:
        raise SettlementError(f"{path}: gives the tenth to {challenger}, which has not voted")
    gathered = []
    for address, text in sorted(said["votes"].items(), key=lambda pair: int(pair[0], 16)):
        signature = bytes.fromhex(text)
        if domain.signer(signature, kind, **message) != address:
            raise SettlementError(f"{path}: the vote of {address} is not signed by it")
        if address not in map(checked, run.auditors):
            raise SettlementError(f"{path}: {address} has voted, and is not one of the auditors")
        gathered.append((signature, tree.proof(address)))
    try:
        overwrite(path, json.dumps(said, indent=1) + "\n")
    except OSError as error:
        raise SettlementError(f"{path}: cannot be written ({error.strerror})") from None
    return gathered


def _read_votes(path: Path) -> dict[str, Any]:
    """Read a file of votes; {} if it is missing. Raises `SettlementError` if it is malformed."""
    if not path.exists():
        return {}
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(said["values"], dict) or not isinstance(said["votes"], dict):
            raise ValueError("a field is malformed")
        for address, signature in said["votes"].items():
            if not _ADDRESS.fullmatch(address) or len(bytes.fromhex(signature)) != 65:
                raise ValueError("a vote is malformed")
        return {"kind": said["kind"], "values": said["values"], "votes": said["votes"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettlementError(f"{path}: not a file of votes ({error})") from None
