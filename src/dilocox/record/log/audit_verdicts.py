"""Verdicts of audits: signed statements, one file each in the run's folder `record/audits`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.transparency_log import read_text

FOLDER = "audits"
AuditVerdict = Literal["EXACT", "WITHIN_TOL", "MISMATCH", "FAIL", "NOT_RUN"]
GOOD, BAD = ("EXACT", "WITHIN_TOL"), ("MISMATCH", "FAIL")


@dataclass(frozen=True)
class Verdict:
    """What an audit of one round of one site has found."""

    site: str
    round: int
    verdict: AuditVerdict
    """EXACT: the same bits. WITHIN_TOL: another determinism class, differences as small as honest
    ones. MISMATCH: the site did something else. FAIL: it withholds what an audit needs. NOT_RUN:
    it could not be judged here."""
    reason: str
    first_bad_step: int | None = None
    """Of a mismatch: the inner step of the round, from 0, in or after which it begins; -1: it was
    there before the first."""
    difference: float | None = None
    """In another class: the largest relative difference of losses, norms and parameters."""
    same_class: bool | None = None
    """Whether auditor and site are of one determinism class, if that is known."""
    states: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the documents of the states that were begun from, by `STAGE/SHARD`."""


@dataclass(frozen=True)
class Selection:
    """Why just this round of this site."""

    by: Literal["request", "beacon"]
    rate: float = 1.0
    size: int = 0
    """Statements of the log, and their root, by which the beacon selected."""
    root: str = ""
    randomness: str = ""
    """Public randomness that went into it, hex; empty if the log alone selected."""


@dataclass(frozen=True)
class Prefix:
    """The first statements of a log."""

    size: int
    root: str
    """Their Merkle root, hex."""


@dataclass(frozen=True)
class Signed:
    """A verdict in its statement."""

    verdict: Verdict
    selection: Selection
    auditor: str
    """Public key, hex."""
    run: str
    seen: Prefix | None = None
    """What the auditor had read of the log; verdicts of earlier versions do not say it."""


def to_statement(signed: Signed, code: str) -> s.Statement:
    """As it is signed. `code`: digest of the auditor's dilocox."""
    said = asdict(signed.verdict)
    states = said.pop("states")
    return s.Statement(
        s.AUDIT,
        {f"state {place}": digest for place, digest in sorted(states.items())},
        {
            "run": signed.run,
            **said,
            "selection": asdict(signed.selection),
            "auditor": signed.auditor,
            "code": code,
            **({} if signed.seen is None else {"log": asdict(signed.seen)}),
        },
    )


def write(folder: Path, signed: Signed, signer: s.Signer, code: str) -> Path:
    """Keep a verdict below a run's folder, in place of this auditor's earlier one of the same
    round and site. Raises `RecordError`."""
    verdict = signed.verdict
    name = f"{verdict.round:06d}-{verdict.site}-{signed.auditor[:16]}.json"
    path = folder / "record" / FOLDER / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{name}.part")
        part.write_text(signer.sign(to_statement(signed, code)) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def read(path: Path, run: str | None) -> Signed:
    """A verdict whose signature and run are right. Raises `RecordError`.

    `run`: none where there is no log that says which it has to be.
    """
    line = read_text(path).strip()
    try:
        said = s.opened(line)[0]
        auditor = str(said.predicate.get("auditor"))
        statement = s.open_signed(line, auditor, run=run or said.run, kinds=(s.AUDIT,))
        return _parsed(statement)
    except RecordError as error:
        raise RecordError(f"{path.name}: {error}") from None


def read_all(folder: Path, run: str) -> list[Signed]:
    """All verdicts below a run's folder, by round and site. Raises `RecordError`."""
    return [read(path, run) for path in paths_of(folder)]


def paths_of(folder: Path) -> list[Path]:
    """Files of all verdicts below a run's folder, by round and site."""
    return sorted((folder / "record" / FOLDER).glob("[!.]*.json"))


def _parsed(statement: s.Statement) -> Signed:
    said: Mapping[str, Any] = statement.predicate
    try:
        chosen = said["selection"]
        verdict = Verdict(
            site=str(said["site"]),
            round=int(said["round"]),
            verdict=said["verdict"],
            reason=str(said["reason"]),
            first_bad_step=said["first_bad_step"],
            difference=said["difference"],
            same_class=said["same_class"],
            states={name.removeprefix("state "): d for name, d in statement.subjects.items()},
        )
        selection = Selection(
            by=chosen["by"],
            rate=float(chosen["rate"]),
            size=int(chosen["size"]),
            root=str(chosen["root"]),
            randomness=str(chosen["randomness"]),
        )
        if verdict.verdict not in (*GOOD, *BAD, "NOT_RUN") or chosen["by"] not in (
            "request",
            "beacon",
        ):
            raise ValueError
        seen = said.get("log")
        prefix = None if seen is None else Prefix(int(seen["size"]), str(seen["root"]))
        return Signed(verdict, selection, str(said["auditor"]), statement.run, prefix)
    except (KeyError, TypeError, ValueError):
        raise RecordError("an audit statement that is not whole") from None
