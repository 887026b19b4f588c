"""What is known and decided of a run, and what is asked of it. Changes come from `state`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import Measured, RoundPlan
from dilocox.coordinator.server.exchange_votes import MAX_EXCUSED, Exchange, Member, RankKey
from dilocox.coordinator.server.held_out import HeldOut
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.site_state import CheckpointState, SiteState

DISPUTED = 50
"""For so many rounds it is remembered between whom a link was broken."""


@dataclass
class Facts:
    """All that the coordinator knows and has decided."""

    config: RunConfig
    digest: str = ""
    phase: str = "enrolling"
    reason: str = ""
    sites: dict[str, SiteState] = field(default_factory=dict)
    """In run file order."""
    versions: dict[str, str] | None = None
    data_digest: str | None = None
    epoch: int = 0
    members: list[Member] = field(default_factory=list)
    """Live sites of the epoch: entering and active ones, run file order."""
    starters: list[str] = field(default_factory=list)
    founder: str | None = None
    first_round: int = 0
    """0, or the round of the checkpoint that the run was resumed from."""
    first_tick: int = 0
    """0, or the tick of that checkpoint."""
    resumes: int = 0
    """How often the run went back to a checkpoint."""
    plans: dict[int, RoundPlan] = field(default_factory=dict)
    next_round: int = 0
    """First round without a plan."""
    ledger: Ledger = field(default_factory=Ledger)
    steps_before: int | None = None
    """Inner steps of the run that this one goes on from; none: it begins anew."""
    payloads: dict[str, list[list[int]]] | None = None
    """Bytes by codec, stage and piece; none until they are known."""
    measured: dict[int, dict[str, Measured]] = field(default_factory=dict)
    """By round and site, of the rounds that plans look back at."""
    shown: dict[str, dict[str, str]] = field(default_factory=dict)
    """While a site enters: SHA-256 of pieces by version (`entries`) and site."""
    newest: dict[str, dict[str, int]] = field(default_factory=dict)
    """While a site enters: the latest version that was told, by "STAGE/SHARD/PIECE" and site."""
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    undecided: dict[str, None] = field(default_factory=dict)
    """Keys of exchanges without a decision, in order."""
    usual: dict[str, int | None] = field(default_factory=dict)
    """The gate's running mean of gains by place, in millionths."""
    doubts: dict[str, int] = field(default_factory=dict)
    """How often a site denied to hold another's contribution, by "SITE/OTHER" (`doubts`)."""
    held_out: dict[str, HeldOut] = field(default_factory=dict)
    """What sites have reported of the held-out loss."""
    ends_early: str = ""
    """Why the next plan is the flush, whatever steps are left; empty: it is not."""
    lease: int = 0
    stop_tick: int | None = None
    checkpoints: dict[int, CheckpointState] = field(default_factory=dict)
    store: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """By key of `store`: the site that has set it, if that is known."""
    feed: list[tuple[int, float, str, str]] = field(default_factory=list)
    """(sequence, time, kind, text)."""
    sequence: int = 0

    def __post_init__(self) -> None:
        if not self.sites:
            self.sites = {name: SiteState(name) for name in self.config.sites}

    # --- questions --------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Rounds are being trained."""
        return self.phase in ("running", "stopping")

    @property
    def over(self) -> bool:
        """Nothing will change any more, but by resuming."""
        return self.phase in ("finished", "stopped", "failed")

    @property
    def flush_planned(self) -> bool:
        """The last plan of the run is made."""
        last = self.plans.get(self.next_round - 1)
        return last is not None and last.kind == "flush"

    @property
    def last_step(self) -> int:
        """Inner steps of the typical site before the flush."""
        flush = self.plans[self.next_round - 1] if self.flush_planned else None
        return self.config.total_steps if flush is None else flush.first_step

    @property
    def checkpoint(self) -> CheckpointState | None:
        """What the run goes on from, or went on from last; none if it began anew."""
        return self.checkpoints.get(self.first_tick) if self.first_tick else None

    @property
    def token_issues(self) -> dict[str, int]:
        """By site: which of its join tokens is in force, from 0."""
        return {name: site.standing.token_issue for name, site in self.sites.items()}

    @property
    def tokens_in_force(self) -> dict[str, int]:
        """The same, of the sites that are not banned."""
        return {name: self.token_issues[name] for name in self.admissible}

    @property
    def admissible(self) -> list[str]:
        """Names that are not banned, run file order."""
        return [site.name for site in self.sites.values() if not site.standing.banned]

    def with_role(self, *roles: str) -> list[str]:
        """Sites with one of these roles, run file order."""
        return [site.name for site in self.sites.values() if site.role in roles]

    @property
    def waits_for_sites(self) -> bool:
        """Sites train, but fewer than `outer.min_sites`: nothing is decided and none is planned."""
        return self.running and 0 < len(self.with_role("active")) < self.config.outer.min_sites

    @property
    def live(self) -> list[str]:
        """Sites that the run counts on."""
        return self.with_role("enrolled", "entering", "active")

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(stage, shard) of every rank of a site."""
        site = self.config.site
        return [(stage, shard) for stage in range(site.stages) for shard in range(site.shards)]

    def is_ready(self, site: str) -> bool:
        """All ranks of an entering site hold the full state."""
        return len(self.sites[site].ready) == self.config.site.exchanging_ranks

    def takes_part(self, site: str, round_: int) -> bool:
        """The site's present incarnation contributes to and votes on this round."""
        state, plan = self.sites[site], self.plans.get(round_)
        return (
            state.role == "active"
            and plan is not None
            and site in plan.members
            and state.active_from <= round_
        )

    def unplanned(self, key: ExchangeKey) -> str | None:
        """Why the plan of its round, which exists, has no exchange of this key; None if it has."""
        plan, gradients = self.plans[key.round], self.config.exchanges_gradients
        kind, fragments = ("gradient", 1) if gradients else ("outer", plan.fragments)
        if key.kind != kind:
            return f"the plan of round {key.round} has exchanges of the kind {kind} only"
        if key.fragment >= fragments:
            return f"the plan of round {key.round} has fragments 0 to {fragments - 1} only"
        if key.step >= plan.inner_steps:
            return f"the plan of round {key.round} has steps 0 to {plan.inner_steps - 1} only"
        return None

    def lies_at(self, tick: int, round_: int, slot: int) -> bool:
        """Whether by the plans `slot` slots of `round_` have ended at `tick`. The end of a round is
        the beginning of the next, which need not be planned yet."""
        plan, before = self.plans.get(round_), self.plans.get(round_ - 1)
        if plan is not None:
            return tick == plan.first_tick + slot and slot < max(1, plan.slots)
        return before is not None and slot == 0 and tick == before.first_tick + before.slots

    def unwritten(self, tick: int) -> tuple[int, list[str]]:
        """The latest checkpoint before `tick` that is not whole, and a minority of the active sites
        that has not written its part; nobody where most have not."""
        open_ = [at for at, own in self.checkpoints.items() if own.sites is None and at < tick]
        if not open_:
            return 0, []
        latest = self.checkpoints[max(open_)]
        due = [name for name in self.with_role("active") if self.takes_part(name, latest.round)]
        lacking = [n for n in due if any((n, *rank) not in latest.written for rank in self.ranks)]
        return max(open_), lacking if 2 * len(lacking) < len(due) else []

    def may_plan(self, site: str, round_: int) -> bool:
        """Whether a round is planned because this site asks: one that trains the round before asks
        with its last step, one that has just entered whenever it gets there."""
        if site not in self.sites or self.sites[site].role != "active":
            return False
        training = [name for name in self.sites if self.takes_part(name, round_ - 1)]
        return not training or site in training

    def turned_back(self, site: str) -> bool:
        """It has finished before the run has, and before it had trained a round."""
        known = self.sites[site]
        trained = known.rounds_done > known.active_from
        return known.role == "finished" and not known.complete and not trained

    @property
    def nobody_before(self) -> int:
        """Slots in which no active site has anything to do: those of rounds before the first that
        one of them takes part in; 0 where they are not known."""
        first = min((self.sites[name].active_from for name in self.with_role("active")), default=0)
        before = self.plans.get(first - 1)
        return 0 if before is None else before.first_tick + before.slots

    @property
    def lease_end(self) -> int:
        """The last slot that a lease may name: of the round after the last one that is planned, if
        that is as long. How fast a rank goes is its own word, and no site is further."""
        last = self.plans.get(self.next_round - 1)
        if last is None:
            return self.first_tick + 2 * self.config.outer.inner_steps
        return last.first_tick + 2 * last.slots

    def members_for(self, round_: int) -> list[Member]:
        """Sites of the epoch that an exchange of `round_` is carried between.

        One that enters receives from the first round on none of whose exchanges was begun without
        it; its ranks do not wait for earlier ones. The flush is for those alone that are in its
        plan, and were not left behind since: nobody else has a round to take it into.
        """
        plan = self.plans.get(round_)
        last = plan is not None and plan.kind == "flush"
        members = plan.members if plan is not None and last else self.sites
        return [
            (name, incarnation)
            for name, incarnation in self.members
            if self.sites[name].role != "entering"
            or (self.sites[name].from_round <= round_ and not last)
            if not self.sites[name].leaves_before(round_)
            if name in members
        ]

    def voters(self, exchange: Exchange) -> list[RankKey]:
        """Ranks whose votes decide an exchange."""
        return [
            (site, exchange.stage, shard)
            for site, incarnation in exchange.members
            if self.sites[site].incarnation == incarnation and self.takes_part(site, exchange.round)
            for shard in range(self.config.site.shards)
        ]

    def held_up(self, exchange: Exchange) -> set[str]:
        """Sites that have not voted yet on an exchange of the same stage that was begun earlier:
        they may wait for somebody there, and have nothing to send here. None after `MAX_EXCUSED`
        attempts."""
        found: set[str] = set()
        if len(exchange.excused) >= MAX_EXCUSED:
            return found
        for key in self.undecided:
            if key == exchange.key:
                break
            earlier = self.exchanges[key]
            if earlier.stage == exchange.stage:
                found |= {site for site, *_ in earlier.waiting_for(self.voters(earlier))}
        return found

    def disputes(self, round_: int) -> dict[str, list[str]]:
        """By site: with whom it has had a broken link within `DISPUTED` rounds."""
        return {
            site.name: [name for name, last in site.disputes.items() if last + DISPUTED > round_]
            for site in self.sites.values()
        }

    def staying(self, round_: int) -> list[str]:
        """Active sites that do not leave before `round_`, run file order."""
        return [n for n in self.with_role("active") if not self.sites[n].leaves_before(round_)]

    def donor_for(self, site: str, without: Collection[str] = ()) -> str | None:
        """The active site with the fewest entering sites to feed, of those that `site` does not
        distrust if there are any; none if nobody is active but those of `without`."""
        load = {name: 0 for name in self.staying(self.next_round) if name != site}
        for other in self.sites.values():
            if other.role == "entering" and other.donor in load and other.name != site:
                load[other.donor] += 1
        doubted, tried = self.sites[site].distrusts, self.sites[site].tried
        names = [name for name in load if name not in without]
        key = {name: (name in tried, name in doubted, load[name]) for name in names}
        return min(names, key=lambda name: key[name]) if names else None
