"""The claim `attestations`: evidence of machines, judged by a policy that the reader gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dilocox.record.log.attestation_statements import MACHINE
from dilocox.record.verify.claims import ATTESTATIONS, Claim, NotRunError
from dilocox.record.verify.run_history import RunHistory


class MachineJudge(Protocol):
    """Judges evidence of machines; see `dilocox.tools.attestation.run_judge`."""

    def judge(self, course: RunHistory, entries: Sequence[str], get: Callable[[str], bytes]) -> str:
        """Return a line on the evidence of all machines.

        Args:
            course: The history of the log.
            entries: All entries of the log.
            get: Returns an object of the stores by SHA-256, hex.

        Raises:
            DilocoxError: Evidence is missing, wrong, or breaks the policy (FAIL).
            NotRunError: Evidence cannot be judged here.
            SimulatedError: All evidence holds, but some is of pretended machines.
        """


def policy_of(course: RunHistory) -> str | None:
    """Return the SHA-256 of the policy that the run file names, or None."""
    found = course.config.get("record", {}).get("tee")
    return None if found is None else str(found)


def machine_checks(
    judge: MachineJudge | None,
    course: RunHistory | None,
    agreed: Callable[[], RunHistory],
    entries: Sequence[str],
    get: Callable[[str], bytes],
) -> list[tuple[Claim, Callable[[], str]]]:
    """Return the claim with its check; an empty list if the run has nothing to do with it.

    Args:
        judge: Judges by the reader's policy; None: the reader has given none.
        course: The history of the log; None if the log cannot be read.
        agreed: Returns the history, or raises `NotRunError` if the log is not what it must be.
        entries: All entries of the log.
        get: Returns an object of the stores by SHA-256, hex.
    """
    if judge is not None:
        given = judge
        return [(ATTESTATIONS, lambda: given.judge(agreed(), entries, get))]
    if course is not None and (course.attestations or policy_of(course) is not None):
        return [(ATTESTATIONS, lambda: _unjudged(agreed()))]
    return []


def _unjudged(course: RunHistory) -> str:
    found = course.attestations
    if not found:
        raise NotRunError("no site has filed evidence; give the policy with --tee")
    sites = ", ".join(sorted({each.site for each in found}))
    formats = ", ".join(sorted({each.format for each in found}))
    known = any(each.format == MACHINE for each in found)
    how = "give the policy with --tee" if known else "this dilocox judges no such evidence"
    raise NotRunError(f"{len(found)} of {sites} ({formats}); {how}")
