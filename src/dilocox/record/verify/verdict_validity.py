"""Does a verdict still stand? It is about a round as the log had it when the auditor read it.

A run that is resumed leaves a course behind: rounds are trained anew, and states signed anew. What
an auditor had repeated before is then no part of the run any more, whatever came of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import Prefix, Signed
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.transparency_log import leaves_of
from dilocox.record.log.verdict_statements import HandedIn
from dilocox.record.verify.audit_sampling import decided, exchanges_of
from dilocox.record.verify.run_history import RunHistory


def prefixes_of(entries: Sequence[str], sizes: Collection[int]) -> dict[int, Prefix]:
    """The first statements of a log, for each of `sizes` that it has; read once for all of them."""
    there = [size for size in sizes if 0 <= size <= len(entries)]
    roots = roots_at(leaves_of(entries), there)
    return {size: Prefix(size, root.hex()) for size, root in roots.items()}


def still_standing(
    course: RunHistory, entries: Sequence[str], signed: Collection[Signed]
) -> list[Signed]:
    """Those of the verdicts that are about the run's course, and not about one that it has left.

    Raises `RecordError` for one that was made by another log.
    """
    known = prefixes_of(entries, [each.seen.size for each in signed if each.seen is not None])
    for each in signed:
        if each.seen is not None and known.get(each.seen.size) != each.seen:
            where = f"round {each.verdict.round} of {each.verdict.site}"
            raise RecordError(f"the audit of {where} was made by another log")
    return [
        each
        for each in signed
        if not _left_behind(course, each.verdict.round, each.verdict.site, _read(course, each))
    ]


def stands(course: RunHistory, handed_in: HandedIn) -> bool:
    """Whether what the log names of a verdict is about the run's course."""
    return not _left_behind(course, handed_in.round, handed_in.site, handed_in.seen)


def _left_behind(course: RunHistory, round_: int, site: str, read: int) -> bool:
    """Whether a round of a site, or the state that it begins or ends in, was signed anew since an
    auditor has read so many statements."""
    resumed = min((number for number in course.resumes if number >= read), default=None)
    if resumed is None:
        return False
    if not decided(course, round_):
        return True
    numbers = [course.numbers[key] for key in exchanges_of(course, round_)]
    numbers += [
        state.number
        for (number, name, _, _), state in course.rounds.items()
        if name == site and number in (round_, round_ + 1)
    ]
    return max(numbers) > resumed


def _read(course: RunHistory, signed: Signed) -> int:
    """Statements that the auditor had read. Of a verdict that does not say it, those before the
    latest resume."""
    if signed.seen is not None:
        return signed.seen.size
    if signed.selection.by == "beacon":
        return signed.selection.size
    return max(course.resumes, default=0)
