"""State of one exchange of one stage: attempts, votes and contribution set. Without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.protocol.verdicts import Fetch, RankOpinion, Verdict

RankKey = tuple[str, int, int]
"""(site, stage, shard)."""
Member = tuple[str, int]
"""(site, incarnation)."""
MAX_BROKEN = 4
"""After this many broken attempts of one exchange, the site with the worst links is dropped."""
MAX_EXCUSED = 32
"""Largest number of attempts of one exchange that may break without blame for any site."""
UNREACHABLE = "unreachable"


@dataclass
class Vote:
    """One rank's vote on an exchange."""

    held: list[str]
    """Sites whose whole contribution the rank holds."""
    contributes: bool
    """Whether the rank's own contribution may count."""
    digest: str | None = None
    """SHA-256 of the rank's own payload, if given."""
    opinions: Mapping[str, RankOpinion] = field(default_factory=dict)
    committed: bool = True
    """Whether the rank had committed to its payload before any payload was sent."""
    recommitted: bool = False
    """Whether the rank had committed to another payload before a resume."""


@dataclass
class Exchange:
    """State of the exchange `key`. `members` are the sites of the epoch in which it takes place."""

    key: str
    round: int
    stage: int
    epoch: int
    members: list[Member]
    attempt: int = 1
    votes: dict[RankKey, Vote] = field(default_factory=dict)
    uncommitted: set[RankKey] = field(default_factory=set)
    """Ranks that have voted in an earlier attempt with nothing to which they had committed."""
    done: set[RankKey] = field(default_factory=set)
    fetches: list[Fetch] = field(default_factory=list)
    """Payloads that ranks fetch from each other after all have voted (`payload_fetches`)."""
    fetched: set[RankKey] = field(default_factory=set)
    """Ranks that have ended their fetches and voted again."""
    averaging: list[str] | None = None
    """`reduce` only: the sites over which this attempt averages. None: not decided yet."""
    decision: list[str] | None = None
    """The final contribution set. None: not decided yet."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    shares: dict[str, list[list[int]]] = field(default_factory=dict)
    """Shares that count, by site and shard, in 65,536ths; empty: all payloads count in full."""
    usual_before: int | None = None
    """The gate's running mean of gains before the decision, in millionths."""
    digests: frozenset[str] = frozenset()
    """SHA-256 of the payloads named in votes; empty before the decision."""
    broken: dict[int, dict[RankKey, list[str]]] = field(default_factory=dict)
    """By attempt: ranks that could not complete it, and the sites whose links they report."""
    excused: set[int] = field(default_factory=set)
    """Broken attempts without blame: an earlier exchange holds up the reported sites."""

    @property
    def place(self) -> str:
        """`STAGE/FRAGMENT`, the end of the key."""
        return "/".join(self.key.split("/")[-2:])

    def note(
        self, verdicts: Mapping[str, Mapping[str, Any]], shares: Mapping[str, list[list[int]]]
    ) -> None:
        """Store verdicts (as JSON, by site) and shares of the decision."""
        self.verdicts = {site: Verdict.model_validate(said) for site, said in verdicts.items()}
        self.shares = {site: [list(own) for own in by_shard] for site, by_shard in shares.items()}
        self.digests = frozenset(vote.digest for vote in self.votes.values() if vote.digest)

    def repin(self, epoch: int, members: list[Member]) -> None:
        """Begin a new attempt in another epoch; all votes become void."""
        self.epoch, self.members = epoch, list(members)
        self.attempt += 1
        self.uncommitted |= {voter for voter, vote in self.votes.items() if not vote.committed}
        self.votes, self.done, self.averaging = {}, set(), None
        self.fetches, self.fetched = [], set()

    def waiting_for(self, voters: Sequence[RankKey]) -> list[RankKey]:
        """Return the voters without a vote in the current phase."""
        if self.averaging is not None:
            return [voter for voter in voters if voter not in self.done]
        again = self.fetching - self.fetched
        return [voter for voter in voters if voter not in self.votes or voter in again]

    def phase_to_count(self, voter: RankKey, phase: str) -> str | None:
        """Return the phase in which a vote in `phase` counts, or None if it changes nothing."""
        if phase == "fetched" and voter not in self.votes:
            return "held"  # The first vote was lost when the coordinator's machine crashed.
        if phase == "fetched":
            return phase if voter in self.fetching - self.fetched else None
        return None if voter in (self.votes if phase == "held" else self.done) else phase

    @property
    def fetching(self) -> set[RankKey]:
        """Ranks that fetch payloads in this attempt, or send them."""
        names = ((name, each.shard) for each in self.fetches for name in (each.site, each.holder))
        return {(name, self.stage, shard) for name, shard in names}

    def contribution_set(self, voters: Sequence[RankKey], order: Sequence[str]) -> list[str]:
        """Return the sites whose contribution every voter holds whole, in `order`.

        A site is left out if one of its own ranks does not contribute. A voter without a
        contribution that most hold has been excluded before (`disputes`).
        """
        sites = {site for site, _, _ in voters}
        for voter in voters:
            vote = self.votes[voter]
            sites &= set(vote.held)
            if not vote.contributes:
                sites.discard(voter[0])
        return [site for site in order if site in sites]

    def site_to_drop(
        self, sites: Sequence[str], disputes: Mapping[str, Collection[str]]
    ) -> tuple[str, str] | None:
        """Return the site to drop because of broken links, and the reason; None if there is none.

        `sites` are the voting sites in run file order. `disputes` holds, by site, the sites with
        which it lately had a broken link, reported by either side. The rules, in order:

        - A receiving site is dropped after two attempts in which it reported a broken link or was
          named: no site needs it, and its own reports count against itself.
        - A voting site is dropped if all others, at least two, name it in two attempts.
        - After `MAX_BROKEN` broken attempts, the voting site with disputes with most others is
          dropped. So one site cannot drive out several, by its own reports or by theirs.
        - Of equal sites, one that names others but is named by none is dropped, because only its
          own reports speak for it. Otherwise the last in the run file is dropped.
        """
        receiving = [name for name, _ in self.members if name not in sites]
        unreached: Counter[str] = Counter()
        pairs: set[tuple[str, str]] = set()
        for reports in self.broken.values():
            named = {
                (reporter, name)
                for (reporter, _, _), failed in reports.items()
                for name in failed
                if name != reporter
            }
            pairs |= named
            reporters = {reporter for reporter, _, _ in reports}
            for site in receiving:
                unreached[site] += site in reporters or any(site in pair for pair in named)
            for site in sites:
                others = [other for other in sites if other != site]
                if len(others) >= 2 and all((other, site) in named for other in others):
                    unreached[site] += 1
        for site in (*receiving, *sites):
            if unreached[site] >= 2:
                return site, UNREACHABLE
        pairs = {pair for pair in pairs if set(pair) <= set(sites)}
        if not self.exhausted or not pairs:
            return None
        return _at_fault(pairs, sites, disputes)

    @property
    def exhausted(self) -> bool:
        """Whether `MAX_BROKEN` attempts were broken, excused ones not counted."""
        return len(self.broken.keys() - self.excused) >= MAX_BROKEN


def _at_fault(
    pairs: set[tuple[str, str]], sites: Sequence[str], disputes: Mapping[str, Collection[str]]
) -> tuple[str, str]:
    """Return which of `sites` to drop, and why. `pairs` are (reporter, named site)."""
    partners = {
        site: {other for pair in pairs if site in pair for other in pair if other != site}
        for site in sites
    }
    weight = {s: len(own | set(disputes.get(s, ()))) for s, own in partners.items() if own}
    most = [site for site in weight if weight[site] == max(weight.values())]
    alone = [
        site
        for site in most
        if any(who == site for who, _ in pairs) and not any(name == site for _, name in pairs)
    ]
    site = (alone or most)[-1]
    others = ", ".join(other for other in sites if other in partners[site])
    if weight[site] > 1 and len(most) == 1:
        return site, f"{UNREACHABLE}: it has had broken links with more sites than any other has"
    doubt = "; nobody else can tell which of the two is at fault" if len(sites) == 2 else ""
    if alone:
        why = f"it alone says that it has no link to {others}"
    else:
        why = f"by its own word and that of {others} they have no link to each other"
    return site, f"{UNREACHABLE}: {why}{doubt}"
