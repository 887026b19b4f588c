"""Claims of `dilocox verify` on what others than the run keep: a chain, and witnesses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import LogContent
from dilocox.record.verify.chain_anchors import ChainHeads
from dilocox.record.verify.chain_stakes import chain_checks
from dilocox.record.verify.claims import WITNESSES, Claim
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.verify.witness_claims import Witnesses, judge_witnesses

Check = tuple[Claim, Callable[[], str]]


def outside(
    chain: ChainHeads | None,
    witnesses: Witnesses | None,
    run: Path,
    content: LogContent,
    course: RunHistory | None,
    agreed: Callable[[], RunHistory],
) -> list[Check]:
    """Return the claims that the reader has asked for, each with its check.

    Args:
        chain: What a chain says; None: no chain was asked.
        witnesses: Whom the reader trusts; None: no witness was named.
        run: The run's folder.
        content: The log.
        course: The log's history; None if the log cannot be read.
        agreed: Returns the history, or raises `NotRunError` if the log is not what it must be.
    """
    found: list[Check] = []
    if chain is not None:
        found += chain_checks(chain, course, agreed, content.entries)
    if witnesses is not None:

        def cosigned() -> str:
            agreed()
            key = NoteKey.parse(content.public)
            return judge_witnesses(witnesses, run / "record", key, content.entries)

        found.append((WITNESSES, cosigned))
    return found
