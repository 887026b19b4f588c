"""Which payloads ranks fetch from each other after their votes. Pure functions.

If a payload did not reach one rank, other ranks hold it. So this rank fetches the payload from
one of them and votes again, before a site is excluded because it lacks the payload. This works only
in `gather`, where all payloads go to all ranks. In `reduce` only the sender has a rank's chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from dilocox.coordinator.protocol.verdicts import Fetch
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.disputes import holds
from dilocox.coordinator.server.exchange_votes import Exchange, RankKey


def wanted(exchange: Exchange, voters: Sequence[RankKey], time: float) -> e.Fetching | None:
    """Return the event that tells ranks to fetch payloads that most hold and they lack.

    None if there is nothing to fetch, or if this attempt has fetched before. All `voters` must have
    voted. `time` stamps the event.
    """
    if exchange.fetches:
        return None
    fetches = _fetches(exchange, voters)
    if not fetches:
        return None
    found = [each.model_dump() for each in fetches]
    return e.Fetching(time, exchange.key, exchange.attempt, found)


def _fetches(exchange: Exchange, voters: Sequence[RankKey]) -> list[Fetch]:
    found: list[Fetch] = []
    serves: Counter[RankKey] = Counter()
    for own in voters:
        vote = exchange.votes[own]
        beside = [voter for voter in voters if voter[2] == own[2]]
        lacking = [voter for voter in beside if not holds(exchange, voter, own)]
        if vote.digest is None or not vote.contributes or 2 * len(lacking) >= len(beside):
            continue
        for reporter in lacking:
            holder = _holder(exchange, own, reporter, beside, serves)
            if reporter != own and holder is not None:
                serves[holder] += 1
                found.append(
                    Fetch(
                        site=reporter[0],
                        shard=own[2],
                        sender=own[0],
                        holder=holder[0],
                        digest=vote.digest,
                    )
                )
    return found


def _holder(
    exchange: Exchange,
    sender: RankKey,
    reporter: RankKey,
    beside: Sequence[RankKey],
    serves: Mapping[RankKey, int],
) -> RankKey | None:
    """Return the rank from which `reporter` fetches, or None.

    The rank names the same bytes as the sender, is not the sender itself, and serves fewest other
    fetches. Each attempt chooses another rank. So a reporter that calls every link broken has to
    accuse several sites.
    """
    there = [
        voter
        for voter in beside
        if voter not in (sender, reporter) and _has(exchange, voter, sender)
    ]
    if not there:
        return None
    start = exchange.attempt % len(there)
    return min([*there[start:], *there[:start]], key=lambda voter: serves.get(voter, 0))


def _has(exchange: Exchange, voter: RankKey, sender: RankKey) -> bool:
    """Return whether `voter` names the same payload digest as `sender`."""
    opinion = exchange.votes[voter].opinions.get(sender[0])
    own = exchange.votes[sender].digest
    return holds(exchange, voter, sender) and opinion is not None and opinion.digest == own


def line(fetches: Collection[Fetch], key: str) -> str:
    """Return the message for people about these fetches of exchange `key`."""
    by_site: dict[str, list[str]] = {}
    for each in fetches:
        text = f"from {each.holder} what {each.sender} sent"
        if text not in by_site.setdefault(each.site, []):
            by_site[each.site].append(text)
    found = "; ".join(f"{site} fetches {', '.join(texts)}" for site, texts in by_site.items())
    return f"{key}: {found}, which did not arrive whole"
