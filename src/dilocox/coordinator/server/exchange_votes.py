"""Contribution sets: one exchange of one stage, its attempts and its votes, without I/O."""

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
"""So many broken attempts of one exchange, and the site with the worst links has to go."""
MAX_EXCUSED = 32
"""So many attempts of one exchange may count against nobody."""
UNREACHABLE = "unreachable"


@dataclass
class Vote:
    """What a rank holds whole, and whether its own contribution may be counted."""

    held: list[str]
    contributes: bool
    digest: str | None = None
    """SHA-256 of its own payload, if it was given."""
    opinions: Mapping[str, RankOpinion] = field(default_factory=dict)
    committed: bool = True
    """Its own payload is the one that it had committed to before any was sent."""
    recommitted: bool = False
    """It had committed to another one before a resume."""


@dataclass
class Exchange:
    """State of one key. `members` are the sites of the epoch that it is pinned to."""

    key: str
    round: int
    stage: int
    epoch: int
    members: list[Member]
    attempt: int = 1
    votes: dict[RankKey, Vote] = field(default_factory=dict)
    done: set[RankKey] = field(default_factory=set)
    fetches: list[Fetch] = field(default_factory=list)
    """What ranks fetch from each other in this attempt, once all have voted (`payload_fetches`)."""
    fetched: set[RankKey] = field(default_factory=set)
    """Who is through with that, and has voted again."""
    averaging: list[str] | None = None
    """`reduce`: the set that this attempt averages over."""
    decision: list[str] | None = None
    """The contribution set, once and for all."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    shares: dict[str, list[list[int]]] = field(default_factory=dict)
    """What counts of each site by shard, in 65,536ths; empty: all of it."""
    usual_before: int | None = None
    """The gate's running mean before it was decided."""
    digests: frozenset[str] = frozenset()
    """SHA-256 of the payloads that came, once it is decided."""
    broken: dict[int, dict[RankKey, list[str]]] = field(default_factory=dict)
    """By attempt: who could not complete it, and whose links that rank names."""
    excused: set[int] = field(default_factory=set)
    """Attempts that count against nobody: who was named is held up in an earlier exchange."""

    @property
    def place(self) -> str:
        """Stage and fragment, as the end of its key has them."""
        return "/".join(self.key.split("/")[-2:])

    def note(
        self, verdicts: Mapping[str, Mapping[str, Any]], shares: Mapping[str, list[list[int]]]
    ) -> None:
        """Keep what was decided about the contributions, each verdict as JSON."""
        self.verdicts = {site: Verdict.model_validate(said) for site, said in verdicts.items()}
        self.shares = {site: [list(own) for own in by_shard] for site, by_shard in shares.items()}
        self.digests = frozenset(vote.digest for vote in self.votes.values() if vote.digest)

    def repin(self, epoch: int, members: list[Member]) -> None:
        """A new attempt in another epoch: all votes are void."""
        self.epoch, self.members = epoch, list(members)
        self.attempt += 1
        self.votes, self.done, self.averaging = {}, set(), None
        self.fetches, self.fetched = [], set()

    def waiting_for(self, voters: Sequence[RankKey]) -> list[RankKey]:
        """Voters without a vote in the present phase."""
        if self.averaging is not None:
            return [voter for voter in voters if voter not in self.done]
        again = self.fetching - self.fetched
        return [voter for voter in voters if voter not in self.votes or voter in again]

    def phase_to_count(self, voter: RankKey, phase: str) -> str | None:
        """The phase that a vote in `phase` counts in; none if it changes nothing."""
        if phase == "fetched" and voter not in self.votes:
            return "held"  # its first vote was lost with the machine's power
        if phase == "fetched":
            return phase if voter in self.fetching - self.fetched else None
        return None if voter in (self.votes if phase == "held" else self.done) else phase

    @property
    def fetching(self) -> set[RankKey]:
        """Ranks that fetch in this attempt, or are fetched from."""
        names = ((name, each.shard) for each in self.fetches for name in (each.site, each.holder))
        return {(name, self.stage, shard) for name, shard in names}

    def contribution_set(self, voters: Sequence[RankKey], order: Sequence[str]) -> list[str]:
        """Sites that every voter holds whole and all of whose own ranks let count, in `order`.

        A voter that does not hold what most hold is no voter any more (`disputes`).
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
        """A site that the voting `sites` (run file order) cannot reach, or one of them; and why.

        `disputes`: by site, with whom it has lately had a broken link, whoever of the two said so.
        One that only receives goes first: it is missed by nobody, and what it says counts against
        itself. Two attempts are enough. Of those that vote, one that all others, two or more, name
        in two attempts goes at once. After `MAX_BROKEN` broken attempts one has to go: the one that
        has disputes with most others. So nobody puts out several others, whether it reports them
        or makes them report it. Of equals the one that names others and is named by none of these
        goes, since its word is all there is, and else the last in the run file.
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
        """Broken too often."""
        return len(self.broken.keys() - self.excused) >= MAX_BROKEN


def _at_fault(
    pairs: set[tuple[str, str]], sites: Sequence[str], disputes: Mapping[str, Collection[str]]
) -> tuple[str, str]:
    """Which of `sites` goes, and why, where (reporter, named) are `pairs`."""
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
