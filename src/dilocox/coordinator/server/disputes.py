"""Who is set aside when ranks differ about what a site has sent. Pure functions.

A rank that does not hold a contribution, or holds other bytes, says so with its vote. A lie and a
real loss look the same to the coordinator. So the majority decides: what most sites hold counts,
and a site that does not hold it is set aside. An average without that site's vote is possible;
an average without the contribution would give every member a veto.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dilocox.coordinator.server.exchange_votes import Exchange, RankKey


@dataclass(frozen=True)
class Dispute:
    """A `reporter` does not hold what `sender` says that it has sent."""

    reporter: str
    sender: str
    settled: bool
    """Most sites hold it, by shard and by digest: then the reporter is at fault, or was slighted by
    the sender. The contribution counts either way."""


def disputes(exchange: Exchange, voters: Sequence[RankKey]) -> list[Dispute]:
    """All disputes about contributions that could count; every one of `voters` has voted.

    A majority is more than half of the sites that vote, the sender among them. So two sites have
    none, and three outvote one.
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
    """(site to set aside, senders whose contributions it does not hold); None if there is none.

    One at a time, since one site can be at the bottom of all: of the reporters against whom most
    sites are, the one with a part in most disputes; of equals, the one named last.
    """
    found = list(found)
    parts = Counter(name for each in found for name in (each.reporter, each.sender))
    against = [each.reporter for each in found if each.settled]
    if not against:
        return None
    odd = max(reversed(against), key=lambda name: parts[name])
    return odd, [each.sender for each in found if each.settled and each.reporter == odd]


def holds(exchange: Exchange, voter: RankKey, sender: RankKey) -> bool:
    """`voter` holds the payload that the rank `sender` says that it has sent, as far as it says."""
    vote, own = exchange.votes[voter], exchange.votes[sender].digest
    if sender[0] not in vote.held:
        return False
    opinion = vote.opinions.get(sender[0])
    if voter == sender or own is None or opinion is None or opinion.digest is None:
        return True
    return opinion.digest == own
