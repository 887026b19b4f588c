"""Judges what a chain says of a run: its heads, and the stakes of the accounts of its sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dilocox.errors import RecordError, SettlementError
from dilocox.record.verify.chain_anchors import ChainHeads, check_same_run, judge_anchors
from dilocox.record.verify.claims import ANCHORS, STAKES, Claim, NotRunError
from dilocox.record.verify.run_history import RunHistory


def chain_checks(
    chain: ChainHeads,
    course: RunHistory | None,
    agreed: Callable[[], RunHistory],
    entries: Sequence[str],
) -> list[tuple[Claim, Callable[[], str]]]:
    """Return the claims that a chain is asked for, each with its check.

    Args:
        chain: What the chain says.
        course: The history of the log; None if the log cannot be read.
        agreed: Returns the history, or raises `NotRunError` if the log is not what it must be.
        entries: All entries of the log.
    """
    found: list[tuple[Claim, Callable[[], str]]] = [
        (ANCHORS, lambda: judge_anchors(chain, agreed(), entries))
    ]
    if course is not None and admits_by_stake(course):
        found.append((STAKES, lambda: judge_stakes(chain, agreed())))
    return found


def admits_by_stake(course: RunHistory) -> bool:
    """Return True if the run file says that sites join by stake alone."""
    return (course.config.get("settlement") or {}).get("admission") == "stake"


def judge_stakes(found: ChainHeads, course: RunHistory) -> str:
    """Return a line on the enrolments of a run that admits by stake.

    Raises:
        RecordError: An enrolment is not signed by the site's account, or the account never had a
            stake, or the chain's run is another one (FAIL).
        NotRunError: The chain could not be asked, or no site has enrolled.
    """
    terms = check_same_run(found, course) or {}
    if not course.enrolments:
        raise NotRunError("no site has enrolled")
    accounts = {}
    for number, said in enumerate(course.enrolments, 1):
        site = str(said["site"])
        what = f"enrolment {number}, of {site}"
        account = str(terms["accounts"].get(site, "")).lower()
        if "stake" not in said:
            raise RecordError(f"{what}: no account vouches for its key, and the run file asks so")
        try:
            proof = said["stake"]
            signer = found.signer(str(said["key"]), int(proof["expiry"]), str(proof["signature"]))
        except (SettlementError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{what}: {error}") from None
        if not account or signer.lower() != account:
            raise RecordError(
                f"{what}: its key is signed by {signer} for this run, and not by the site's "
                f"account {account or '(none)'}"
            )
        if account not in found.staked:
            raise RecordError(f"{what}: its account {account} never had a stake in {found.where}")
        accounts[site] = account
    return (
        f"{len(course.enrolments)} enrolments of {len(accounts)} sites, signed by "
        f"{len(set(accounts.values()))} accounts that have staked"
    )
