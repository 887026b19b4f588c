"""Judges a pending settlement by an auditor's own copy of the log.

An owner could anchor a log that the auditors do not have, or one that nobody can read. Neither may
keep an auditor from voting, so both are reasons to veto, and no errors.
"""

from __future__ import annotations

from pathlib import Path

from dilocox.errors import DilocoxError, RecordError, SettlementError
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import LogContent, leaves_of
from dilocox.record.verify.run_history import read_history
from dilocox.tools.settlement.amounts import covered
from dilocox.tools.settlement.binding import check_log
from dilocox.tools.settlement.claims_tree import ClaimsTree
from dilocox.tools.settlement.run_on_chain import RunOnChain
from dilocox.tools.settlement.settling import owed_at


def veto_reason(
    run: RunOnChain, folder: Path, head: tuple[int, bytes], claims: bytes, withheld: bool
) -> str | None:
    """Return why a settlement is wrong; None if it is what the log gives.

    Args:
        run: The run.
        folder: A folder with the auditor's copy of the record.
        head: Size and root of the anchored head that was settled.
        claims: The settlement's claims root.
        withheld: The owner withholds the log: a copy that is too short, or that cannot be read, is
            a reason.

    Raises:
        SettlementError: The copy is too short to tell, or is of another run.
        RecordError: The copy is not what its key has signed.
    """
    size, root = head
    try:
        own = _own_log(run, folder)
    except RecordError as error:
        if withheld:
            return f"the owner withholds the log: {error}"
        raise
    if len(own.entries) < size:
        short = f"this copy of the log has {len(own.entries)} statements, the settlement {size}"
        if withheld:
            return f"the owner withholds the log: {short}"
        raise SettlementError(
            f"{folder}: {short}: get the newer log from the owner and run this again; if the owner "
            "withholds it, vote with --withheld"
        )
    if _root(own, size) != root:
        return f"the anchored head of {size} statements is not a prefix of this log"
    try:
        owed = owed_at(folder, size, root)
    except DilocoxError as error:
        if _root(covered(folder), size) != root:
            raise  # the copy has changed since, so it shows nothing
        return f"the anchored log gives no amounts: {error}"
    if owed and ClaimsTree(run.run, owed).root == claims:
        return None
    return f"the settlement is not what the log's first {size} statements give"


def _own_log(run: RunOnChain, folder: Path) -> LogContent:
    """Open the auditor's copy, which must be of the run, and what the run's log key has signed."""
    found = covered(folder)
    # The first statement names the log's key, and its digest is the log's id in the contract.
    course = read_history(found.entries[:1], NoteKey.parse(found.public))
    check_log(run, course.run, folder)
    return found


def _root(log: LogContent, size: int) -> bytes | None:
    """Return the root of a log's first statements; None if it has fewer."""
    return roots_at(leaves_of(log.entries), [size]).get(size)
