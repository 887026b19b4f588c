"""Fields of the coordinator's state, and queries on them. Only `state` changes the fields."""

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
"""Number of rounds for which the coordinator remembers which sites had a broken link."""


@dataclass
class Facts:
    """Fields and queries of the coordinator's state."""

    config: RunConfig
    digest: str = ""
    """Digest of the run file; empty before the first event."""
    phase: str = "enrolling"
    reason: str = ""
    sites: dict[str, SiteState] = field(default_factory=dict)
    """State by site, in run file order."""
    versions: dict[str, str] | None = None
    data_digest: str | None = None
    base_digest: str | None = None
    """Digest of the frozen base model; None if the run has no adapters."""
    epoch: int = 0
    members: list[Member] = field(default_factory=list)
    """Live sites of the epoch, entering and active ones, in run file order."""
    starters: list[str] = field(default_factory=list)
    """Sites that the start waits for."""
    founder: str | None = None
    first_round: int = 0
    """Round of the checkpoint from which the run was resumed; 0 without a resume."""
    first_tick: int = 0
    """Tick of the checkpoint from which the run was resumed; 0 without a resume."""
    resumes: int = 0
    """How often the run was resumed from a checkpoint."""
    plans: dict[int, RoundPlan] = field(default_factory=dict)
    next_round: int = 0
    """First round without a plan."""
    ledger: Ledger = field(default_factory=Ledger)
    steps_before: int | None = None
    """Inner steps of the earlier run that this run continues. None: there is no earlier run."""
    payloads: dict[str, list[list[int]]] | None = None
    """Payload bytes by codec, stage and piece. None: not known yet."""
    measured: dict[int, dict[str, Measured]] = field(default_factory=dict)
    """Measurements by round and site, for the past rounds that plans depend on."""
    shown: dict[str, dict[str, str]] = field(default_factory=dict)
    """While a site enters: SHA-256 of pieces by version (`entry_requests.key_of`) and site."""
    newest: dict[str, dict[str, int]] = field(default_factory=dict)
    """While a site enters: the latest reported version, by "STAGE/SHARD/PIECE" and site."""
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    """Exchanges of recent rounds by key."""
    undecided: dict[str, None] = field(default_factory=dict)
    """Keys of exchanges without a decision, in the order in which they began."""
    usual: dict[str, int | None] = field(default_factory=dict)
    """The gate's running mean of gains in millionths, by `Exchange.place`."""
    doubts: dict[str, int] = field(default_factory=dict)
    """How often a site denied holding another site's contribution, by "SITE/OTHER" (`doubts`)."""
    held_out: dict[str, HeldOut] = field(default_factory=dict)
    """Reported held-out losses by site."""
    ends_early: str = ""
    """Why the next plan is the flush although steps are left; empty: the run does not end early."""
    lease: int = 0
    """Ranks may finish slots up to and including this tick."""
    stop_tick: int | None = None
    """Tick at which all ranks stop. None: no stop is planned."""
    checkpoints: dict[int, CheckpointState] = field(default_factory=dict)
    store: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """Site that set each key of `store`; empty: not known."""
    feed: list[tuple[int, float, str, str]] = field(default_factory=list)
    """Messages for people: (sequence, time in Unix seconds, kind, text)."""
    sequence: int = 0
    """Rises with every change that a display shows."""

    def __post_init__(self) -> None:
        if not self.sites:
            self.sites = {name: SiteState(name) for name in self.config.sites}

    # --- queries ----------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether sites are training rounds."""
        return self.phase in ("running", "stopping")

    @property
    def over(self) -> bool:
        """Whether the run has ended: only a resume can change the state."""
        return self.phase in ("finished", "stopped", "failed")

    @property
    def flush_planned(self) -> bool:
        """Whether the flush, the last round of the run, has been planned."""
        last = self.plans.get(self.next_round - 1)
        return last is not None and last.kind == "flush"

    @property
    def last_step(self) -> int:
        """Inner steps of the typical site before the flush."""
        flush = self.plans[self.next_round - 1] if self.flush_planned else None
        return self.config.total_steps if flush is None else flush.first_step

    @property
    def checkpoint(self) -> CheckpointState | None:
        """Checkpoint from which the run was last resumed. None: the run was never resumed."""
        return self.checkpoints.get(self.first_tick) if self.first_tick else None

    @property
    def token_issues(self) -> dict[str, int]:
        """Number of the valid join token of each site, counted from 0."""
        return {name: site.standing.token_issue for name, site in self.sites.items()}

    @property
    def tokens_in_force(self) -> dict[str, int]:
        """`token_issues` of the sites that are not banned."""
        return {name: self.token_issues[name] for name in self.admissible}

    @property
    def admissible(self) -> list[str]:
        """Names of sites that are not banned, in run file order."""
        return [site.name for site in self.sites.values() if not site.standing.banned]

    def with_role(self, *roles: str) -> list[str]:
        """Return the sites that have one of these roles, in run file order."""
        return [site.name for site in self.sites.values() if site.role in roles]

    @property
    def waits_for_sites(self) -> bool:
        """Whether sites train, but fewer than `outer.min_sites`: no exchange or plan is decided."""
        return self.running and 0 < len(self.with_role("active")) < self.config.outer.min_sites

    @property
    def live(self) -> list[str]:
        """Sites that are enrolled, entering or active."""
        return self.with_role("enrolled", "entering", "active")

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(stage, shard) of every exchanging rank of a site."""
        site = self.config.site
        return [(stage, shard) for stage in range(site.stages) for shard in range(site.shards)]

    def is_ready(self, site: str) -> bool:
        """Return whether all ranks of an entering site hold the full state."""
        return len(self.sites[site].ready) == self.config.site.exchanging_ranks

    def takes_part(self, site: str, round_: int) -> bool:
        """Return whether the site's current incarnation contributes to and votes on this round."""
        state, plan = self.sites[site], self.plans.get(round_)
        return (
            state.role == "active"
            and plan is not None
            and site in plan.members
            and state.active_from <= round_
        )

    def unplanned(self, key: ExchangeKey) -> str | None:
        """Return why the plan of the key's round has no such exchange; None if it has one.

        The plan of the round must exist.
        """
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
        """Return whether, by the plans, exactly `slot` slots of `round_` have ended at `tick`.

        The end of a round counts as slot 0 of the next round, which need not be planned yet.
        """
        plan, before = self.plans.get(round_), self.plans.get(round_ - 1)
        if plan is not None:
            return tick == plan.first_tick + slot and slot < max(1, plan.slots)
        return before is not None and slot == 0 and tick == before.first_tick + before.slots

    def unwritten(self, tick: int) -> tuple[int, list[str]]:
        """Return the latest incomplete checkpoint before `tick`, and the sites that hold it up.

        The sites are active sites that have not written their part. The list is empty if they are
        half of the sites or more. Without an incomplete checkpoint the result is (0, []).
        """
        open_ = [at for at, own in self.checkpoints.items() if own.sites is None and at < tick]
        if not open_:
            return 0, []
        latest = self.checkpoints[max(open_)]
        due = [name for name in self.with_role("active") if self.takes_part(name, latest.round)]
        lacking = [n for n in due if any((n, *rank) not in latest.written for rank in self.ranks)]
        return max(open_), lacking if 2 * len(lacking) < len(due) else []

    def may_plan(self, site: str, round_: int) -> bool:
        """Return whether a request of this site may cause `round_` to be planned.

        A site that trains the round before asks only at its last step. A site that has just entered
        could ask too early, so it counts only if no site trains the round before.
        """
        if site not in self.sites or self.sites[site].role != "active":
            return False
        training = [name for name in self.sites if self.takes_part(name, round_ - 1)]
        return not training or site in training

    def turned_back(self, site: str) -> bool:
        """Return whether the site finished before the run did and without training a round."""
        known = self.sites[site]
        trained = known.rounds_done > known.active_from
        return known.role == "finished" and not known.complete and not trained

    @property
    def nobody_before(self) -> int:
        """Number of slots before the first round in which an active site takes part.

        No active site has work in these slots. 0 if the plan before that round is not known.
        """
        first = min((self.sites[name].active_from for name in self.with_role("active")), default=0)
        before = self.plans.get(first - 1)
        return 0 if before is None else before.first_tick + before.slots

    @property
    def lease_end(self) -> int:
        """The highest tick that a lease may name.

        This tick ends the round after the last planned round; both rounds count as equally long.
        The lease needs this bound because a rank's reported speed is only its own claim.
        """
        last = self.plans.get(self.next_round - 1)
        if last is None:
            return self.first_tick + 2 * self.config.outer.inner_steps
        return last.first_tick + 2 * last.slots

    def members_for(self, round_: int) -> list[Member]:
        """Return the sites of the epoch between which an exchange of `round_` takes place.

        An entering site receives from its `from_round` on, the first round in which no exchange
        began without it. Only sites of the flush's plan that are not entering take part in the
        flush, because no round follows in which another site could use the result.
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
        """Return the ranks whose votes decide an exchange."""
        return [
            (site, exchange.stage, shard)
            for site, incarnation in exchange.members
            if self.sites[site].incarnation == incarnation and self.takes_part(site, exchange.round)
            for shard in range(self.config.site.shards)
        ]

    def held_up(self, exchange: Exchange) -> set[str]:
        """Return the sites that have not yet voted on an earlier exchange of the same stage.

        Such a site may be waiting for another site there, so it cannot send here yet. The result is
        empty once `MAX_EXCUSED` attempts were excused.
        """
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
        """Return, by site, the sites with which it had a broken link lately (`DISPUTED`)."""
        return {
            site.name: [name for name, last in site.disputes.items() if last + DISPUTED > round_]
            for site in self.sites.values()
        }

    def staying(self, round_: int) -> list[str]:
        """Return the active sites that do not leave before `round_`, in run file order."""
        return [n for n in self.with_role("active") if not self.sites[n].leaves_before(round_)]

    def donor_for(self, site: str, without: Collection[str] = ()) -> str | None:
        """Return the best donor for `site`: an active site that stays and is not in `without`.

        Donors that `site` has not tried come first, then those that it does not distrust, then
        those that serve the fewest entering sites. None if there is no donor.
        """
        load = {name: 0 for name in self.staying(self.next_round) if name != site}
        for other in self.sites.values():
            if other.role == "entering" and other.donor in load and other.name != site:
                load[other.donor] += 1
        doubted, tried = self.sites[site].distrusts, self.sites[site].tried
        names = [name for name in load if name not in without]
        key = {name: (name in tried, name in doubted, load[name]) for name in names}
        return min(names, key=lambda name: key[name]) if names else None
