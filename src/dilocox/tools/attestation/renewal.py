"""Evidence ages by rounds of the log: was each machine's renewed in time? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dilocox.record.verify.run_history import RunHistory


@dataclass(frozen=True)
class Filed:
    """A piece of evidence that holds."""

    site: str
    number: int
    """Index of its statement in the log."""
    node: int
    nodes: int
    round: int
    """Round of the moment that the evidence names."""


def round_at(course: RunHistory, size: int) -> int:
    """Return the number of rounds with a decided outer step among the first `size` statements."""
    found = (
        step.key.round + 1
        for key, step in course.steps.items()
        if course.numbers.get(key, size) < size
    )
    return max(found, default=0)


def check_renewed(course: RunHistory, filed: Sequence[Filed], most: int) -> str:
    """Return the first gap in the evidence of a site whose contribution counts; empty if none.

    For every start of a site, every machine must have been attested so that between two pieces of
    evidence, before the first and after the last, at most `most` rounds lie in which the site
    contributed.
    """
    for site, start, end, rounds in _stays(course):
        own = [each for each in filed if each.site == site and start < each.number < end]
        if not own:
            return f"the log has no evidence of {site} for its rounds {rounds[0]} to {rounds[-1]}"
        nodes = {each.nodes for each in own}
        if len(nodes) > 1:
            return f"{site} has said that it has {min(nodes)} machines, and {max(nodes)}"
        for node in range(nodes.pop()):
            times = sorted(each.round for each in own if each.node == node)
            if not times:
                return f"the log has no evidence of machine {node} of {site}"
            gap = _gap(times, rounds, most)
            if gap is not None:
                return (
                    f"evidence of machine {node} of {site} is not renewed in rounds {gap[0]} to "
                    f"{gap[1]}: the policy allows {most} (max_age_rounds)"
                )
    return ""


def idle(course: RunHistory, site: str, number: int) -> bool:
    """Return whether a statement of a site is of a start in which it contributed nothing.

    False if nothing shows that: before the site's first start, and in a run without outer steps.

    Args:
        course: The history of the log.
        site: Name of the site.
        number: Index of the statement in the log.
    """
    if not course.steps or not any(each < number for each in course.starts.get(site, [])):
        return False
    return not any(each == site and start < number < end for each, start, end, _ in _stays(course))


def _gap(times: Sequence[int], rounds: Sequence[int], most: int) -> tuple[int, int] | None:
    """Return the ends of the first gap of more than `most` rounds with a contribution in it."""
    first, last = rounds[0], rounds[-1]
    ends = [min(first, times[0]), *times, max(last, times[-1])]
    for begin, end in pairwise(ends):
        if end - begin > most and any(begin <= each <= end for each in rounds):
            return begin, end
    return None


def _stays(course: RunHistory) -> list[tuple[str, int, int, list[int]]]:
    """Return (site, enrolment, next enrolment, its rounds) of each start that contributed.

    Enrolments are indices of statements; the last start has no end.
    """
    found: dict[tuple[str, int, int], set[int]] = {}
    for key, step in course.steps.items():
        number = course.numbers[key]
        for site in step.set:
            starts = [*course.starts.get(site, []), 1 << 62]
            for start, end in pairwise(starts):
                if start < number < end:
                    found.setdefault((site, start, end), set()).add(step.key.round)
    return [(*each, sorted(rounds)) for each, rounds in sorted(found.items())]
