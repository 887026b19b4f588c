"""Lines for people about what sites say of each other's contributions. Pure functions.

Where no majority settles a dispute, a contribution is left out on the word of a few: with two
sites, of one. The coordinator cannot tell who is right. So it names who said what, and people can
look at the two sites' logs. A site could say such a thing in every exchange: a line comes with the
first, second, fourth and eighth time, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.coordinator.server.disputes import disputes
from dilocox.coordinator.server.exchange_votes import Exchange, RankKey

NO_MAJORITY = (
    "two sites have no majority: either can deny that it holds the other's contribution, which "
    "then does not count, and give a wrong state to the other when it enters; denials are told"
)
"""The line with which a run of two sites starts."""
_CHECKPOINT = ""
"""In the place of the other site: what is not there is a part of a checkpoint."""
_SMALL = ""
"""Key of the number of sets that are smaller than half of their round's sites."""


def of_decided(
    counts: dict[str, int], exchange: Exchange, voters: Sequence[RankKey], members: Sequence[str]
) -> list[str]:
    """The lines about an exchange that has just been decided, its votes still there.

    `counts`: how often what happened, to be kept and changed; `members`: sites of the round's plan.
    """
    assert exchange.decision is not None
    counted, lines = exchange.decision, []
    denied: dict[str, list[str]] = {}
    for each in disputes(exchange, [voter for voter in voters if voter in exchange.votes]):
        if each.sender not in counted:
            denied.setdefault(each.sender, []).append(each.reporter)
    for sender, reporters in denied.items():
        times = max(_again(counts, reporter, sender) for reporter in reporters)
        if not _is_told(times):
            continue
        verdict = exchange.verdicts.get(sender)
        other = verdict is not None and verdict.code == "equivocation"
        many = len(reporters) > 1
        they = "say that they" if many else "says that it"
        holds = f"{'do' if many else 'does'} not hold it"
        what = "got something else from it than it names" if other else holds
        lines.append(
            f"{exchange.key}: what {sender} sent does not count, since {', '.join(reporters)} "
            f"{they} {what}{_alone(reporters, times)}"
        )
    if 2 * len(counted) < len(members):
        counts[_SMALL] = times = counts.get(_SMALL, 0) + 1
        if _is_told(times):
            verdicts = exchange.verdicts
            out = [
                f"{site} ({verdicts[site].code if site in verdicts else 'not there'})"
                for site in members
                if site not in counted
            ]
            lines.append(
                f"{exchange.key}: {len(counted)} of {len(members)} contributions count "
                f"({', '.join(counted) or 'none'}), without {', '.join(out)}"
            )
    return lines


def of_lacking(counts: dict[str, int], reporter: str, senders: Sequence[str]) -> list[str]:
    """The lines about a site that does not hold what most hold of `senders`. What comes of that is
    told anyway."""
    again: dict[int, list[str]] = {}
    for sender in senders:
        again.setdefault(_again(counts, reporter, sender), []).append(sender)
    return [
        f"what {', '.join(names)} sent{_alone([reporter], times)}"
        for times, names in again.items()
        if _is_told(times) and times > 1
    ]


def of_unwritten(counts: dict[str, int], tick: int, sites: Sequence[str]) -> list[str]:
    """The lines about `sites` that have not written their parts of the checkpoint at `tick`, while
    others write the next one. One site keeps all from going on from there."""
    return [
        f"checkpoint at slot {tick}: {site} has not written its part, and without it the run "
        "cannot go on from there"
        for site in sites
        if _is_told(_again(counts, site, _CHECKPOINT))
    ]


def _again(counts: dict[str, int], reporter: str, sender: str) -> int:
    key = f"{reporter}/{sender}"
    counts[key] = counts.get(key, 0) + 1
    return counts[key]


def _is_told(times: int) -> bool:
    return times & (times - 1) == 0


def _alone(reporters: Sequence[str], times: int) -> str:
    """What a site means that says so again and again, and is the only one."""
    if len(reporters) > 1 or times < 2:
        return ""
    return (
        f": {reporters[0]} alone has denied it {times} times; the two sites' logs tell whether it "
        "is denied falsely, sent falsely, or spoiled on the way"
    )
