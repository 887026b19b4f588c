"""Statements by which a run's log names verdicts of audits.

A verdict is a file in `record/audits`. Its auditor also signs a short statement with the digest of
that file, and a member of the run hands the statement in. The log then names the verdict, even if
somebody deletes the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dilocox.config.site import SITE_NAME
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import BAD, GOOD, AuditVerdict, Signed, checked, digest_of
from dilocox.record.log.digests import digest_text
from dilocox.record.log.state_statements import whole
from dilocox.record.log.transparency_log import read_text

MOST_BYTES = 2048
"""Largest statement with its envelope, bytes. Only the names of sites vary in length."""
_SITE = re.compile(SITE_NAME)
_LAST = 2**53


@dataclass(frozen=True)
class HandedIn:
    """A verdict as the log names it, signed by its auditor."""

    site: str
    """The site that was audited."""
    round: int
    verdict: AuditVerdict
    auditor: str
    """Public key, 64 hex digits."""
    by: str
    """Site whose token handed the verdict in, as the coordinator has checked; empty for the run's
    operator."""
    digest: str
    """SHA-256 of the verdict's line in `record/audits`."""
    seen: int
    """Number of the log's first statements that the auditor had read."""
    number: int
    """Index of the statement in the log, from 0."""

    @classmethod
    def of(cls, statement: s.Statement, number: int) -> HandedIn:
        """Parse statement `number` of the log. Raises `RecordError` if it is malformed."""
        said = statement.predicate
        with whole(statement):
            found = cls(
                site=str(said["site"]),
                round=_count(said["round"]),
                verdict=cast(AuditVerdict, str(said["verdict"])),
                auditor=digest_text(said["auditor"]),
                by=str(said["by"]),
                digest=digest_text(statement.subjects["verdict"]),
                seen=_count(said["seen"]),
                number=number,
            )
            if found.verdict not in (*GOOD, *BAD, "NOT_RUN") or found.seen > number:
                raise ValueError
            if not all(_SITE.fullmatch(name) for name in (found.site, found.by or found.site)):
                raise ValueError
            return found

    def statement(self, run: str) -> s.Statement:
        """Build the statement for the run with id `run`; the inverse of `of`."""
        return s.Statement(
            s.VERDICT,
            {"verdict": self.digest},
            {
                "run": run,
                "site": self.site,
                "round": self.round,
                "verdict": self.verdict,
                "auditor": self.auditor,
                "by": self.by,
                "seen": self.seen,
            },
        )

    @property
    def file(self) -> tuple[str, ...]:
        """Facts that the verdict's file must match: digest, auditor, site, round and verdict."""
        return self.digest, self.auditor, self.site, str(self.round), self.verdict

    @property
    def text(self) -> str:
        """One line for users: the verdict, its auditor, and the member that handed it in."""
        by = f"site {self.by}" if self.by else "the operator"
        return (
            f"round {self.round} of {self.site}: {self.verdict}, signed by {self.auditor[:12]}… "
            f"and handed in by {by}"
        )


@dataclass(frozen=True)
class VerdictFile:
    """A verdict's file in a run's folder."""

    signed: Signed
    line: str
    """The single line of the file."""

    @property
    def name(self) -> tuple[str, ...]:
        """Facts that an entry of the log which names the file must match (`HandedIn.file`)."""
        return of_file(self.signed, self.line, "").file


def read_file(path: Path, run: str | None) -> VerdictFile:
    """Read a verdict's file, as `audit_verdicts.read` does. Raises `RecordError`."""
    line = read_text(path).strip()
    return VerdictFile(checked(line, run, path.name), line)


def of_file(signed: Signed, line: str, by: str) -> HandedIn:
    """Build the entry that names a verdict in the log.

    Args:
        signed: The verdict.
        line: The single line of the verdict's file.
        by: Site that hands the verdict in; empty for the run's operator.
    """
    verdict = signed.verdict
    seen = 0 if signed.seen is None else signed.seen.size
    digest = digest_of(line)
    return HandedIn(
        verdict.site, verdict.round, verdict.verdict, signed.auditor, by, digest, seen, seen
    )


def latest(handed_in: Iterable[HandedIn]) -> list[HandedIn]:
    """Keep each auditor's newest verdict on each round of each site, sorted by round and site.

    The newest verdict is the one whose auditor had read most of the log; of equal ones, the later.
    A verdict that is handed in again counts where it stood first. So nobody can undo a newer
    verdict with an older one. Verdicts on abandoned rounds must be left out before.
    """
    first: dict[tuple[str, int, str, str], HandedIn] = {}
    for each in handed_in:
        first.setdefault((each.auditor, each.round, each.site, each.digest), each)
    found: dict[tuple[str, int, str], HandedIn] = {}
    for each in sorted(first.values(), key=lambda each: (each.seen, each.number)):
        found[each.auditor, each.round, each.site] = each
    return sorted(found.values(), key=lambda each: (each.round, each.site, each.number))


def taken_in(text: str, run: str, by: str, number: int) -> HandedIn:
    """Check a signed verdict that a member hands in for the log.

    Args:
        text: The envelope.
        run: Id of the run.
        by: Site whose token hands the verdict in; empty for the run's operator.
        number: Index that the statement will have in the log.

    Raises:
        RecordError: The auditor has not signed this statement, or it is too long or malformed, or
            it names another member.
    """
    if len(text) > MOST_BYTES:
        raise RecordError(f"it has {len(text)} characters; the limit is {MOST_BYTES}")
    auditor = _auditor(s.opened(text)[0].predicate)
    statement = s.open_signed(text, auditor, run=run, kinds=(s.VERDICT,))
    found = HandedIn.of(statement, number)
    if found.by != by:
        raise RecordError(
            f"it says that {found.by or 'the operator'} hands it in, but "
            f"{by or 'the operator'} does; sign it again"
        )
    if statement != found.statement(run):
        raise RecordError("it has fields that a verdict does not have")
    return found


def check_planned(found: HandedIn, sites: Collection[str], last: int) -> None:
    """Raise `RecordError` for a verdict on a site or a round that cannot have been audited.

    `sites`: all sites of the run. `last`: last round planned with states for audits; -1 if none
    was.
    """
    if found.site not in sites:
        raise RecordError(f"site {found.site}: not in the run file")
    if found.round > last:
        newest = f"the newest is round {last}" if last >= 0 else "none is (record.states_every)"
        raise RecordError(
            f"round {found.round} of {found.site}: not planned to be audited; {newest}"
        )


def _auditor(said: Mapping[str, Any]) -> str:
    try:
        return digest_text(said.get("auditor"))
    except ValueError:
        raise RecordError("it names no auditor's key") from None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LAST:
        raise ValueError(value)
    return value
