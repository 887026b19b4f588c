"""Verdicts of audits: signed statements, each in a file of the run's folder `record/audits`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.digests import sha256
from dilocox.record.log.transparency_log import read_text

FOLDER = "audits"
AuditVerdict = Literal["EXACT", "WITHIN_TOL", "MISMATCH", "FAIL", "NOT_RUN"]
GOOD, BAD = ("EXACT", "WITHIN_TOL"), ("MISMATCH", "FAIL")


@dataclass(frozen=True)
class Verdict:
    """The result of an audit of one round of one site."""

    site: str
    round: int
    verdict: AuditVerdict
    """EXACT: the repetition gave the same bits. WITHIN_TOL: the auditor has another determinism
    class, and differences are as small as between honest sites. MISMATCH: the site computed
    something else. FAIL: the site withholds data that an audit needs. NOT_RUN: the auditor could
    not judge."""
    reason: str
    first_bad_step: int | None = None
    """With MISMATCH: the inner step of the round, from 0, in or after which the difference begins;
    -1 if it was there before the first step."""
    difference: float | None = None
    """Between different classes: largest relative difference of losses, norms and parameters."""
    same_class: bool | None = None
    """True if auditor and site have the same determinism class; None if unknown."""
    states: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the documents of the round's start states, by `STAGE/SHARD`."""


@dataclass(frozen=True)
class Selection:
    """How this round of this site was selected for an audit."""

    by: Literal["request", "beacon"]
    """`request`: somebody asked for it. `beacon`: random selection from public data."""
    rate: float = 1.0
    """Share of rounds that the beacon selects."""
    size: int = 0
    """Number of statements of the log from which the beacon selected."""
    root: str = ""
    """Merkle root of these statements, hex."""
    randomness: str = ""
    """Public randomness that went into the selection, hex; empty if the log alone selected."""


@dataclass(frozen=True)
class Prefix:
    """The first statements of a log."""

    size: int
    root: str
    """Their Merkle root, hex."""


@dataclass(frozen=True)
class Signed:
    """A verdict with its auditor, run and selection, as a statement contains it."""

    verdict: Verdict
    selection: Selection
    auditor: str
    """Public key, hex."""
    run: str
    seen: Prefix | None = None
    """The part of the log that the auditor had read; None in verdicts of earlier versions."""


def to_statement(signed: Signed, code: str) -> s.Statement:
    """Build the statement to sign. `code`: digest of the auditor's dilocox source code."""
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


def write(
    folder: Path, signed: Signed, signer: s.Signer, code: str, named: Collection[str] = ()
) -> Path:
    """Sign a verdict and write its file below a run's folder; return the file.

    The file replaces this auditor's earlier verdict on the same round and site. An earlier verdict
    that the log names is kept under a name with its digest, because readers look for its file.

    Args:
        folder: The run's folder.
        signed: The verdict.
        signer: The auditor's key.
        code: Digest of the auditor's dilocox source code.
        named: Digests (`digest_of`) of the verdicts that the log names.

    Raises:
        RecordError: The file cannot be written.
    """
    verdict = signed.verdict
    name = f"{verdict.round:06d}-{verdict.site}-{signed.auditor[:16]}.json"
    path = folder / "record" / FOLDER / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{name}.part")
        part.write_text(signer.sign(to_statement(signed, code)) + "\n", encoding="utf-8")
        digest = digest_of(read_text(path)) if named and path.exists() else ""
        if digest in named:
            path.replace(path.with_name(f"{path.stem}-{digest[:16]}.json"))
        part.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def digest_of(line: str) -> str:
    """Return the SHA-256, hex, of the line of a verdict's file."""
    return sha256(line.strip().encode())


def read(path: Path, run: str | None) -> Signed:
    """Read a verdict's file, and check its signature and its run.

    `run`: id of the run; None accepts a verdict of any run, because there is no log. Raises
    `RecordError` if the file cannot be read or a check fails.
    """
    return checked(read_text(path).strip(), run, path.name)


def checked(line: str, run: str | None, name: str) -> Signed:
    """Return the verdict in the line of the file `name`, checked as by `read`."""
    try:
        said = s.opened(line)[0]
        auditor = str(said.predicate.get("auditor"))
        statement = s.open_signed(line, auditor, run=run or said.run, kinds=(s.AUDIT,))
        return _parsed(statement)
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None


def read_all(folder: Path, run: str) -> list[Signed]:
    """Read all verdicts below a run's folder, sorted by round and site. Raises `RecordError`."""
    return [read(path, run) for path in paths_of(folder)]


def paths_of(folder: Path) -> list[Path]:
    """List the files of all verdicts below a run's folder, sorted by round and site."""
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
            randomness=bytes.fromhex(str(chosen["randomness"])).hex(),
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
        raise RecordError("the audit statement is malformed") from None
