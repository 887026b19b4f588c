"""Pure functions from a `CoordinatorState` to the event that follows from it."""

from __future__ import annotations

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import all_boundary_slots
from dilocox.coordinator.protocol.verdicts import MICRO
from dilocox.coordinator.server import early_end, payload_fetches, stranded
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.contribution_rules import Evidence, judge
from dilocox.coordinator.server.disputes import disputes, odd_one
from dilocox.coordinator.server.exchange_votes import Exchange, RankKey
from dilocox.coordinator.server.plan_builder import RoundInputs, make_plan
from dilocox.coordinator.server.plan_inputs import decided
from dilocox.coordinator.server.site_state import BANNED
from dilocox.coordinator.server.startup import begun, entry_round
from dilocox.coordinator.server.state import CoordinatorState

AHEAD = 2
"""A round is planned at most this many rounds ahead of the slowest active site's current round. The
bound is one less if plans depend on measurements: the plan of round t uses measurements of rounds
up to t - 2."""


def decide(
    state: CoordinatorState, wait_for: int, time: float, key: str | None = None
) -> e.Event | None:
    """Return the next event that follows from the state, or None.

    After every event, call it until it returns None. `wait_for` is the number of sites that the
    run starts with. `time` only stamps the event. If `key` is given, only this exchange is checked,
    and neither checkpoints nor an end of the run.
    """
    if state.over:
        return None
    for name in state.live:
        if state.sites[name].standing.banned:
            return e.SiteLost(time, name, state.sites[name].incarnation, BANNED, False)
    # A run does not wait for sites that are not allowed to join.
    wait_for = min(wait_for, max(len(state.admissible), state.config.outer.min_sites))
    started = begun(state, wait_for, time)
    if started is not None:
        return started
    for name in state.with_role("entering", "active"):
        site = state.sites[name]
        if site.left and len(site.left) == state.config.site.exchanging_ranks:
            return e.SiteLost(time, name, site.incarnation, "asked to leave, and done", False)
    # Entering sites count, too: the state that they wait for is complete only after decisions.
    if state.running and len(state.with_role("entering", "active")) >= state.config.outer.min_sites:
        for text in [key] if key in state.undecided else [] if key else state.undecided:
            decided = _decide_exchange(state, state.exchanges[str(text)], time)
            if decided is not None:
                return decided
    if key is not None:
        return None
    return (
        _checkpoint(state, time)
        or early_end.due(state, time)
        or stranded.ended(state, time)
        or _end(state, time)
    )


def plan_round(state: CoordinatorState, round_: int, time: float) -> e.Planned | str:
    """Return the plan of `round_` if it may be made now, else a text with what it waits for."""
    active = state.staying(round_)
    if state.phase == "stopping":
        # A site that has not trained yet turns back, possibly before it hears of the stop.
        active = [name for name in active if state.takes_part(name, round_ - 1)] or active
    if not state.running:
        entering = [name for name in state.starters if state.sites[name].role == "entering"]
        return f"the start ({', '.join(entering) or state.phase})"
    if round_ != state.next_round:
        return f"the plan of round {state.next_round}"
    least = max(1, state.config.outer.min_sites)
    if len(active) < least and not (active and _lands_for_entering(state, round_, least)):
        return f"min_sites = {state.config.outer.min_sites} (active now: {len(active)})"
    ahead = AHEAD - state.config.measures
    slow = [name for name in active if state.sites[name].rounds_done + ahead < round_]
    if slow:
        return f"the end of round {round_ - ahead - 1} at {', '.join(slow)}"
    before = state.plans.get(round_ - 1)
    first_tick = before.first_tick + before.slots if before else 0
    first_step = before.first_step + before.inner_steps if before else state.steps_before or 0
    paces, choice, estimate = decided(state, round_, active)
    inputs = RoundInputs(
        round_, first_tick, first_step, active, choice, estimate, paces, before, state.ends_early
    )
    plan = make_plan(state.config, inputs, state.ledger)
    return e.Planned(time, plan.model_dump(mode="json"))


def _lands_for_entering(state: CoordinatorState, round_: int, least: int) -> bool:
    """Return whether `round_` must be planned although too few sites are active.

    Two conditions must hold. Sites that enter with `round_` complete the number of `least` sites.
    The last exchanges land only in that round, so donors have no complete state to give before.
    """
    before = state.plans.get(round_ - 1)
    entering = state.with_role("entering")
    if before is None or len(state.staying(round_)) + len(entering) < least:
        return False
    if all(state.sites[name].from_round != round_ for name in entering):
        return False
    slots = all_boundary_slots(state.config.site.stages, before.fragments, before.slots)
    return max(slots) + before.delay > before.slots


def _decide_exchange(state: CoordinatorState, exchange: Exchange, time: float) -> e.Event | None:
    voters = state.voters(exchange)
    if not voters:
        # All contributing sites are lost, and a site that has just entered waits for a decision.
        if state.phase != "running" or not state.with_role("active"):
            return None
        return e.Decided(time, exchange.key, exchange.attempt, "commit", [], {})
    if exchange.broken:
        sites = list(dict.fromkeys(site for site, _, _ in voters))
        drop = exchange.site_to_drop(sites, state.disputes(exchange.round))
        if drop is not None:
            name, reason = drop
            return e.SiteLost(time, name, state.sites[name].incarnation, reason, True)
        if exchange.exhausted:
            who = {site for reports in exchange.broken.values() for site, *_ in reports}
            return e.Ended(
                time,
                "failed",
                f"exchange {exchange.key}: broken {len(exchange.broken)} times, by the word of "
                f"{', '.join(sorted(who))}, and no site named; see the ranks' logs there",
            )
        if exchange.attempt in exchange.broken:
            return e.Retried(time, exchange.key)
    if exchange.waiting_for(voters):
        return None
    if exchange.averaging is not None:
        verdicts = {
            site: verdict.model_dump(exclude_defaults=True)
            for site, verdict in exchange.verdicts.items()
        }
        return e.Decided(
            time, exchange.key, exchange.attempt, "commit", exchange.averaging, verdicts
        )
    fetch = payload_fetches.wanted(exchange, voters, time)
    if fetch is not None:
        return fetch
    odd = _set_aside(state, exchange, voters, time)
    if odd is not None:
        return odd
    found = judge(evidence(state, exchange, voters))
    decision = "average" if state.config.outer.exchange == "reduce" else "commit"
    verdicts = {
        site: verdict.model_dump(exclude_defaults=True) for site, verdict in found.verdicts.items()
    }
    return e.Decided(
        time, exchange.key, exchange.attempt, decision, found.set, verdicts, found.shares,
        found.usual,
    )  # fmt: skip


def _set_aside(
    state: CoordinatorState, exchange: Exchange, voters: list[RankKey], time: float
) -> e.Event | None:
    """Return the event that excludes a site without contributions that most sites hold, or None.

    The site is overtaken and enters again, from a donor with which it has no dispute if there is
    one. If the run is not in the phase "running", the method exchanges gradients or no donor is
    left, the site is lost instead.
    """
    odd = odd_one(disputes(exchange, voters))
    if odd is None:
        return None
    site, senders = odd
    incarnation = state.sites[site].incarnation
    sent = f"what {', '.join(senders)} sent at {exchange.key}"
    reason = f"most hold {sent}, and it says that it does not"
    donors = [name for name in state.staying(state.next_round) if name != site]
    if state.phase != "running" or state.config.exchanges_gradients or not donors:
        return e.SiteLost(time, site, incarnation, reason, True)
    doubted = state.sites[site].distrusts
    donor = min(donors, key=lambda name: (name in doubted, name in senders))
    reason = f"{reason}; it enters again from {donor}"
    return e.Overtaken(time, site, incarnation, donor, reason, entry_round(state), senders)


def evidence(state: CoordinatorState, exchange: Exchange, voters: list[RankKey]) -> Evidence:
    """Collect the evidence of the votes on an exchange's contributions; all `voters` have voted."""
    key, admission = ExchangeKey.parse(exchange.key), state.config.admission
    sites = list(dict.fromkeys(site for site, _, _ in voters))
    whole = exchange.contribution_set(voters, list(state.sites))
    votes = {site: [exchange.votes[v] for v in voters if v[0] == site] for site in sites}
    withdrawn = [site for site in sites if not all(vote.contributes for vote in votes[site])]
    shards = range(state.config.site.shards)
    before = state.exchanges.get(key._replace(round=key.round - 1).text)
    outer = key.kind == "outer"
    return Evidence(
        whole=whole,
        opinions=[
            [exchange.votes[voter].opinions for voter in voters if voter[2] == shard]
            for shard in shards
        ],
        digests={
            site: [exchange.votes[site, exchange.stage, shard].digest for shard in shards]
            for site in sites
        } if outer else {},
        earlier=frozenset() if before is None else before.digests,
        uncommitted=[site for site in sites if not all(vote.committed for vote in votes[site])],
        recommitted=[site for site in sites if any(vote.recommitted for vote in votes[site])],
        robust=admission.gate or admission.aggregation != "mean",
        withdrawn=withdrawn,
        missing=[site for site in sites if site not in (*whole, *withdrawn)],
        training=outer and state.plans[exchange.round].kind == "train",
        tolerance=round(admission.gate_tolerance * MICRO) if admission.gate else None,
        usual=state.usual.get(exchange.place),
    )  # fmt: skip


def writers(state: CoordinatorState, round_: int) -> list[str]:
    """Return the sites whose ranks all write a checkpoint in `round_`."""
    sites = state.with_role("active", "finished")
    if round_ not in state.plans:
        return sites
    return [
        name
        for name in sites
        if name in state.plans[round_].members and state.sites[name].active_from <= round_
    ]


def _checkpoint(state: CoordinatorState, time: float) -> e.Event | None:
    for tick, checkpoint in state.checkpoints.items():
        if checkpoint.sites is not None:
            continue
        sites = [
            name
            for name in writers(state, checkpoint.round)
            if not state.turned_back(name) or any(name == site for site, *_ in checkpoint.written)
        ]
        expected: list[RankKey] = [(site, *rank) for site in sites for rank in state.ranks]
        if expected and all(rank in checkpoint.written for rank in expected):
            return e.CheckpointCommitted(time, tick, sites)
    return None


def _end(state: CoordinatorState, time: float) -> e.Event | None:
    if state.phase == "enrolling":
        return None
    finished = state.with_role("finished")
    if state.with_role("active"):
        return None
    if finished:
        complete = all(state.sites[name].complete for name in finished)
        last = state.plans.get(state.next_round - 1)
        why = "" if last is None or last.kind != "flush" else last.reason
        return e.Ended(
            time, "finished" if complete else "stopped", why if complete else state.reason
        )
    gone = [f"{name}: {state.sites[name].reason}" for name in state.with_role("gone")]
    if not state.live:
        return e.Ended(time, "failed", f"all sites are gone ({'; '.join(gone)})"[:500])
    if state.running:
        return e.Ended(
            time, "failed", f"no active site is left to enter from ({'; '.join(gone)})"[:500]
        )
    return None
