"""Statements by which sites name evidence of the machines that they run on.

The evidence itself lies in the site's store. Extra `[tee]` makes and judges it
(`dilocox.tools.attestation`); the log knows only the fields here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.digests import digest_text
from dilocox.record.log.state_statements import whole

MACHINE = "dilocox/machine/v1"
"""Format of evidence that `dilocox attest` makes. Sites may file other formats, which nobody here
judges."""
MOST_NODES = 1 << 16
MOST_RANDOMNESS = 512
"""Hex digits of public randomness."""
MOST_SECONDS = 600
"""Largest difference between the clocks of a site and of the coordinator."""
_FORMAT = re.compile("[a-z0-9/._+-]{1,64}")
_RANDOM = re.compile(f"([0-9a-f]{{2}}){{0,{MOST_RANDOMNESS // 2}}}")
_LAST = 2**53
_LAST_TIME = 253_402_300_800
"""The year 10,000, in seconds since 1970."""


@dataclass(frozen=True)
class MachineFacts:
    """What a statement of format `MACHINE` says beside the evidence's digest."""

    incarnation: int
    """Number of the site's start, as in its enrolment."""
    node: int
    """Number of the machine among those of the site, from 0."""
    nodes: int
    """Number of machines of the site."""
    size: int
    """Number of statements of the signed checkpoint that the evidence names by its nonce."""
    root: str
    """Root of that checkpoint, hex."""
    randomness: str
    """Public randomness in the nonce, hex; empty if none was at hand."""
    time: int
    """Moment of filing, seconds since 1970. The coordinator refuses one that is far from its
    own."""


@dataclass(frozen=True)
class Attestation:
    """A site's signed statement of evidence."""

    site: str
    format: str
    """The site's name for the kind of evidence: 1 to 64 of a-z, 0-9 and "/._+-"."""
    evidence: str
    """SHA-256, hex, of the evidence in the store."""
    machine: MachineFacts | None = None
    """None for other formats than `MACHINE`."""
    number: int = field(default=-1, compare=False)
    """Index of the statement in the log, from 0."""

    @classmethod
    def of(cls, statement: s.Statement, number: int = -1) -> Attestation:
        """Parse statement `number` of the log. Raises `RecordError` if it is malformed."""
        said = statement.predicate
        with whole(statement):
            evidence = digest_text(statement.subjects["evidence"])
            kind = str(said["format"])
            if not _FORMAT.fullmatch(kind):
                raise ValueError(kind)
            machine = _machine(said) if kind == MACHINE else None
            return cls(str(said["site"]), kind, evidence, machine, number)

    def statement(self, run: str) -> s.Statement:
        """Build the statement of format `MACHINE` for the run with id `run`; inverse of `of`."""
        assert self.machine is not None
        facts = vars(self.machine)
        predicate = {"run": run, "site": self.site, "format": self.format, **facts}
        return s.Statement(s.ATTESTATION, {"evidence": self.evidence}, predicate)


def check_taken(statement: s.Statement, run: str, site: str, enrolment: Mapping[str, Any]) -> None:
    """Check a signed statement of a machine before the log takes it.

    Args:
        statement: The statement.
        run: Id of the run.
        site: Site that files it.
        enrolment: The site's latest enrolment; empty if it has not enrolled.

    Raises:
        RecordError: It is malformed, of another site or start, or of another time.
    """
    found = Attestation.of(statement)
    if found.site != site:
        raise RecordError(f"attestation is of site {found.site!r}, not of {site}")
    if found.machine is None:
        return
    if statement != found.statement(run):
        raise RecordError("attestation has fields that such a statement does not have")
    start = enrolment.get("incarnation")
    if found.machine.incarnation != start:
        raise RecordError(
            f"attestation is of start {found.machine.incarnation} of the site, not of {start}"
        )
    if abs(found.machine.time - time.time()) > MOST_SECONDS:
        raise RecordError(
            f"attestation is of another time than the coordinator's, by more than {MOST_SECONDS} "
            "seconds; set the clock"
        )


def _machine(said: Any) -> MachineFacts:
    names = ("incarnation", "node", "nodes", "size", "time")
    numbers = {name: said[name] for name in names}
    if any(type(each) is not int or not 0 <= each < _LAST for each in numbers.values()):
        raise ValueError
    found = MachineFacts(
        **numbers, root=digest_text(said["root"]), randomness=str(said["randomness"])
    )
    fits = found.node < found.nodes <= MOST_NODES and found.time < _LAST_TIME
    if not fits or not _RANDOM.fullmatch(found.randomness):
        raise ValueError
    return found
