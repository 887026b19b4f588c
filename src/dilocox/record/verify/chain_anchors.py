"""Judges the claim `anchors`: the heads that a chain keeps are prefixes of this log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.config.settlement import names_place, place_problem
from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import Prefix
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.transparency_log import leaves_of
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory

_UNBOUND = (
    "; the run file names no contract, so the log may be registered in others, with other heads"
)


def _nobody(key: str, expiry: int, signature: str) -> str:
    return ""


@dataclass(frozen=True)
class ChainHeads:
    """What a chain says about a run."""

    where: str
    """The contract and the run's id in it, for the line of the claim."""
    chain: int = 0
    """Id of the chain (EIP-155)."""
    contract: str = ""
    owner: str = ""
    """Account that has registered the run."""
    manifest: str = ""
    """Digest of the run file that the run was registered with, hex."""
    log: str = ""
    """Id of the log that the run was registered for, hex."""
    heads: tuple[Prefix, ...] = ()
    """All anchored heads, in their order."""
    staked: frozenset[str] = frozenset()
    """Accounts that have ever staked, in small letters."""
    signer: Callable[[str, int, str], str] = _nobody
    """Returns the account that vouches for a site's key, given the key, the expiry and the
    signature; raises `SettlementError` for what is no signature."""
    forked: bool = False
    """True if the chain has evidence that the owner has signed two logs."""
    fault: str = ""
    """Why the chain could not be asked; empty if it was."""


def judge_anchors(found: ChainHeads, course: RunHistory, entries: Sequence[str]) -> str:
    """Return a line on the anchored heads, which are prefixes of the log.

    Args:
        found: What the chain says.
        course: The history of the log that is verified.
        entries: All entries of that log.

    Raises:
        RecordError: A head is not a prefix of the log, or of another run, or in another place than
            the run file names (FAIL).
        NotRunError: The chain could not be asked, or has no head.
    """
    terms = check_same_run(found, course)
    if found.forked:
        raise RecordError(f"{found.where}: the owner has signed two logs of one size")
    if not found.heads:
        raise NotRunError(f"{found.where} has no anchored head")
    last = found.heads[-1]
    roots = roots_at(leaves_of(entries), [each.size for each in found.heads])
    for each in found.heads:
        if each.size > len(entries):
            raise RecordError(
                f"the chain has a head of {each.size} statements, this log has {len(entries)}: it "
                "was cut back"
            )
        if roots[each.size].hex() != each.root:
            raise RecordError(
                f"the chain's head of {each.size} statements is not a prefix of this log"
            )
    count = f"{len(found.heads)} heads" if len(found.heads) > 1 else "1 head"
    return (
        f"{count} of {found.where}, the newest of {last.size} of {len(entries)} statements; the "
        f"last {len(entries) - last.size} are not anchored{'' if names_place(terms) else _UNBOUND}"
    )


def check_same_run(found: ChainHeads, course: RunHistory) -> Mapping[str, Any] | None:
    """Return `[settlement]` of the run file, if the chain's run is that of the log.

    Raises:
        RecordError: The chain's run is of another log, run file or place.
        NotRunError: The chain could not be asked.
    """
    if found.fault:
        raise NotRunError(found.fault)
    if found.log != course.run:
        raise RecordError(f"{found.where} is of log {found.log[:12]}…, this is {course.run[:12]}…")
    terms: Mapping[str, Any] | None = course.config.get("settlement")
    problem = place_problem(terms, found.chain, found.contract, found.owner)
    if problem is not None:
        raise RecordError(f"{found.where}: {problem}: the log was registered in a second place")
    agreed = str(course.manifest["config_digest"])
    if found.manifest != agreed:
        raise RecordError(
            f"{found.where} was registered with the run file {found.manifest[:12]}…, this log has "
            f"{agreed[:12]}…"
        )
    return terms
