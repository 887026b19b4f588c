"""Which site is excluded when ranks disagree about a site's contribution. Pure functions.

A rank that does not hold a contribution, or holds other bytes, says so with its vote. The
coordinator cannot tell a lie from a real loss. So the majority decides: a contribution that most
sites hold counts, and a site that does not hold it is excluded. Leaving out the contribution
instead would give every site a veto.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dilocox.coordinator.server.exchange_votes import Exchange, RankKey


@dataclass(frozen=True)
class Dispute:
    """The site `reporter` does not hold the contribution that `sender` says it has sent."""

    reporter: str
    sender: str
    settled: bool
    """True if most sites hold the same bytes of a shard, so that the contribution counts. Either
    the reporter is at fault, or the sender sent it other bytes or none."""


def disputes(exchange: Exchange, voters: Sequence[RankKey]) -> list[Dispute]:
    """Return all disputes about contributions that could count. All `voters` must have voted.

    A majority is more than half of the voting sites, including the sender. So of two sites neither
    has a majority, and of three sites two outvote one.
    """
    found: dict[tuple[str, str], bool] = {}
    for sender in dict.fromkeys(site for site, _, _ in voters):
        ranks = [voter for voter in voters if voter[0] == sender]
        if not all(exchange.votes[rank].contributes for rank in ranks):
            continue
        for own in ranks:
            beside = [voter for voter in voters if voter[2] == own[2]]
            lacking = [voter for voter in beside if not holds(exchange, voter, own)]
            settled = 2 * len(lacking) < len(beside)
            for reporter, _, _ in lacking:
                if reporter != sender:
                    before = found.get((reporter, sender), False)
                    found[reporter, sender] = before or settled
    return [Dispute(*pair, settled) for pair, settled in found.items()]


def odd_one(found: Iterable[Dispute]) -> tuple[str, list[str]] | None:
    """Return the site to exclude and the senders whose contributions it lacks, or None.

    Only one site is excluded at a time, because one site can cause all disputes. Among the
    reporters of settled disputes, the reporter with most disputes is excluded; of equal reporters,
    the last one.
    """
    found = list(found)
    parts = Counter(name for each in found for name in (each.reporter, each.sender))
    against = [each.reporter for each in found if each.settled]
    if not against:
        return None
    odd = max(reversed(against), key=lambda name: parts[name])
    return odd, [each.sender for each in found if each.settled and each.reporter == odd]


def holds(exchange: Exchange, voter: RankKey, sender: RankKey) -> bool:
    """Return whether `voter`, by its vote, holds the payload that the rank `sender` voted with."""
    vote, own = exchange.votes[voter], exchange.votes[sender].digest
    if sender[0] not in vote.held:
        return False
    opinion = vote.opinions.get(sender[0])
    if voter == sender or own is None or opinion is None or opinion.digest is None:
        return True
    return opinion.digest == own
