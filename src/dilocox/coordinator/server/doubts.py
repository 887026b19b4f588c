"""Messages for people about sites that deny holding another site's contribution. Pure functions.

If no majority settles a dispute, a few sites can exclude a contribution: with two sites, one can.
The coordinator cannot tell which site is right. So its messages name the sites and their claims,
and people can read both sites' logs. Because a site could deny in every exchange, a message is
written only for the first, second, fourth, eighth time and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.coordinator.server.disputes import disputes
from dilocox.coordinator.server.exchange_votes import Exchange, RankKey

NO_MAJORITY = (
    "two sites have no majority: either can deny that it holds the other's contribution, which "
    "then does not count, and give a wrong state to the other when it enters; denials are told"
)
"""Message at the start of a run with two sites."""
_CHECKPOINT = ""
"""Stands in a key of the counts for the other site, if a part of a checkpoint is missing."""
_SMALL = ""
"""Key of the count of contribution sets with fewer than half of their round's sites."""


def of_decided(
    counts: dict[str, int], exchange: Exchange, voters: Sequence[RankKey], members: Sequence[str]
) -> list[str]:
    """Return the messages about an exchange that has just been decided.

    The exchange must still hold its votes. `counts` holds how often each event happened; it is
    changed, and the caller keeps it. `members` are the sites of the round's plan.
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
    """Return the messages about a site without contributions of `senders` that most sites hold.

    The first time gives no message, because the consequence has a message of its own.
    """
    again: dict[int, list[str]] = {}
    for sender in senders:
        again.setdefault(_again(counts, reporter, sender), []).append(sender)
    return [
        f"what {', '.join(names)} sent{_alone([reporter], times)}"
        for times, names in again.items()
        if _is_told(times) and times > 1
    ]


def of_unwritten(counts: dict[str, int], tick: int, sites: Sequence[str]) -> list[str]:
    """Return the messages about `sites` without their parts of the checkpoint at `tick`.

    Call it when other sites write the next checkpoint. One missing part makes a checkpoint useless.
    """
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
    """Return an addition to the message if one site alone denies repeatedly, else an empty text."""
    if len(reporters) > 1 or times < 2:
        return ""
    return (
        f": {reporters[0]} alone has denied it {times} times; the two sites' logs tell whether it "
        "is denied falsely, sent falsely, or spoiled on the way"
    )
