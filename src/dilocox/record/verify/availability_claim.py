"""Judges the claim `availability`: every cut of the run's payloads has a certificate. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dilocox.config.availability import PieceCode
from dilocox.errors import RecordError
from dilocox.record.log.custody import content_of_step
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory

_NAMED = 3


def code_of(course: RunHistory) -> PieceCode:
    """Return the code of a run with `[availability]`.

    Raises `RecordError` if the run has none, or if its section is malformed.
    """
    try:
        code = PieceCode.of_run(course.config)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RecordError("the run file's [availability] is malformed") from None
    if code is None:
        raise RecordError("the run has no [availability]: its payloads were not cut into pieces")
    if not 1 <= code.needed <= code.pieces:
        raise RecordError("the run file's [availability] is malformed")
    return code


def cuts_of(course: RunHistory) -> Iterator[tuple[str, int, str]]:
    """Iterate over the cuts of all payloads that count, as (exchange key, shard, content)."""
    for step in course.steps.values():
        for shard in range(course.shards):
            content = content_of_step(step, shard)
            if content is not None:
                yield step.key.text, shard, content


def judge_availability(course: RunHistory) -> str:
    """Return a line on the certificates.

    Raises:
        RecordError: Sites have signed different pieces of the same payloads, or pieces of another
            code than the run file's.
        NotRunError: A cut has no certificate (yet).
    """
    code, count, lacking = code_of(course), 0, []
    if course.wrong_custody:
        raise RecordError(course.wrong_custody[0])
    for exchange, shard, content in cuts_of(course):
        count += 1
        roots = course.custody.roots(exchange, shard, content)
        if len(roots) > 1:
            told = "; ".join(f"{', '.join(each)}: {root[:12]}…" for root, each in roots.items())
            raise RecordError(
                f"{exchange} shard {shard}: sites have signed different pieces of the same "
                f"payloads, so somebody has cut wrongly ({told})"
            )
        if course.custody.certified(exchange, shard, code.quorum, content) is None:
            sites = [site for own in roots.values() for site in own]
            lacking.append(f"{exchange} shard {shard} ({', '.join(sites) or 'nobody'})")
    if not count:
        raise NotRunError("no payload counts yet")
    if lacking:
        more = len(lacking) - _NAMED
        named = ", ".join(lacking[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise NotRunError(
            f"{len(lacking)} of {count} cuts are not signed by {code.quorum} of {code.pieces} "
            f"sites: {named}"
        )
    return (
        f"{count} cuts, {code.needed} of {code.pieces} pieces each, signed by at least "
        f"{code.quorum} sites"
    )
