"""Judges whether a verdict of an audit is still about the run.

A verdict is about a round as it stood in the log when the auditor read the log. A resume abandons
part of the history: rounds are trained again, and states are signed again. A verdict on an
abandoned round no longer counts, whether it was good or bad.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import Prefix, Signed
from dilocox.record.log.merkle import roots_at
from dilocox.record.log.transparency_log import leaves_of
from dilocox.record.log.verdict_statements import HandedIn, VerdictFile, latest
from dilocox.record.verify.audit_sampling import decided, exchanges_of
from dilocox.record.verify.run_history import RunHistory


def prefixes_of(entries: Sequence[str], sizes: Collection[int]) -> dict[int, Prefix]:
    """Return the log's prefix of each of `sizes`; sizes beyond the log are left out.

    The entries are read once.
    """
    there = [size for size in sizes if 0 <= size <= len(entries)]
    roots = roots_at(leaves_of(entries), there)
    return {size: Prefix(size, root.hex()) for size, root in roots.items()}


def still_standing(
    course: RunHistory, entries: Sequence[str], signed: Collection[Signed]
) -> list[Signed]:
    """Return the verdicts that are about the run's present history, not about an abandoned part.

    `entries`: all entries of the log. Raises `RecordError` for a verdict made from another log.
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


def not_replaced(course: RunHistory, files: Iterable[VerdictFile]) -> list[VerdictFile]:
    """Return the verdicts among `files` that their auditors have not replaced.

    The log names both the earlier verdict and a newer one of the same auditor on the same round of
    the same site. The earlier one may still be in a folder, and no longer counts.
    """
    standing = [each for each in course.verdicts if stands(course, each)]
    old = {each.file for each in standing} - {each.file for each in latest(standing)}
    return [each for each in files if each.name not in old]


def stands(course: RunHistory, handed_in: HandedIn) -> bool:
    """Return True if a verdict that the log names is about the run's present history."""
    return not _left_behind(course, handed_in.round, handed_in.site, handed_in.seen)


def is_about(course: RunHistory, handed_in: HandedIn, key: str) -> bool:
    """Return True unless a resume has abandoned an exchange that an auditor had repeated.

    The coordinator alone cannot make this False for an exchange that stands: it can neither repeat
    a decision that the resume kept, nor leave another exchange of the round undecided.

    Args:
        course: The history.
        handed_in: A verdict on the round of the exchange.
        key: Key of an exchange that is decided now.
    """
    resumed = _resumed_after(course, handed_in.seen)
    return resumed is None or course.first_numbers[key] < resumed


def _resumed_after(course: RunHistory, read: int) -> int | None:
    """Return the index of the first resume behind the first `read` statements; None: none."""
    return min((number for number in course.resumes if number >= read), default=None)


def _left_behind(course: RunHistory, round_: int, site: str, read: int) -> bool:
    """Return True if a resume has abandoned a round of a site that an auditor had repeated.

    A resume has abandoned the round if the round is undecided now. The same holds if one of its
    exchanges was abandoned and decided again, or its start or end state signed again, after the
    resume. `read`: statements that the auditor had read.
    """
    resumed = _resumed_after(course, read)
    if resumed is None:
        return False
    if not decided(course, round_):
        return True
    numbers = [course.first_numbers[key] for key in exchanges_of(course, round_)]
    numbers += [
        state.number
        for (number, name, _, _), state in course.rounds.items()
        if name == site and number in (round_, round_ + 1)
    ]
    return max(numbers) > resumed


def _read(course: RunHistory, signed: Signed) -> int:
    """Return the number of statements that the auditor had read.

    For a verdict of an earlier version without this number: the statements up to the selection, or
    up to the latest resume.
    """
    if signed.seen is not None:
        return signed.seen.size
    if signed.selection.by == "beacon":
        return signed.selection.size
    return max(course.resumes, default=0)
