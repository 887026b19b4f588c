"""Replies to requests, as pure functions of the coordinator's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.exchange_votes import Exchange, RankKey
from dilocox.coordinator.server.state import REMEMBERED as REMEMBERED
from dilocox.coordinator.server.state import CoordinatorState


def epoch(state: CoordinatorState) -> m.Epoch:
    """Return the current membership epoch. Sites that have finished are shown as active."""
    members: list[Any] = []
    for site, incarnation in state.members:
        role = "entering" if state.sites[site].role == "entering" else "active"
        members.append({"site": site, "incarnation": incarnation, "role": role})
    return m.Epoch.model_validate({"id": state.epoch, "members": members})


def beat_reply(state: CoordinatorState, site: str) -> m.BeatReply:
    """Return the reply to a beat of a rank of `site`."""
    own = state.sites[site]
    entering = [
        m.Entering(site=name, incarnation=state.sites[name].incarnation,
                   donor=state.sites[name].donor, from_round=state.sites[name].from_round,
                   renewals=state.sites[name].renewals)
        for name in state.with_role("entering")
    ]  # fmt: skip
    return m.BeatReply.model_validate(
        {
            "phase": state.phase,
            "reason": state.reason,
            "role": "active" if own.role == "finished" else own.role,
            "donor": own.donor,
            "founder": state.founder,
            "lease": state.lease,
            "stop_tick": state.stop_tick,
            "epoch": epoch(state),
            "entering": entering,
            "waits_for_sites": state.waits_for_sites,
        }
    )


def begin_reply(
    state: CoordinatorState, exchange: Exchange, awaited: Sequence[RankKey] = ()
) -> m.BeginReply:
    """Return attempt and group of an exchange. `awaited`: ranks that are still missing."""
    members: list[Any] = []
    for site, incarnation in exchange.members:
        same = state.sites[site].incarnation == incarnation
        role = "member" if same and state.takes_part(site, exchange.round) else "entering"
        members.append({"site": site, "incarnation": incarnation, "role": role})
    return m.BeginReply.model_validate(
        {
            "epoch": exchange.epoch,
            "attempt": exchange.attempt,
            "members": members,
            "decided": exchange.decision is not None,
            "waiting_for": [rank_text(rank) for rank in awaited],
        }
    )


def vote_reply(state: CoordinatorState, exchange: Exchange, request: m.VoteRequest) -> m.VoteReply:
    """Return the decision for the voter or observer of `request`."""
    chosen: list[str] = []
    waiting: list[str] = []
    voter = (request.rank.site, request.rank.stage, request.rank.shard)
    if request.rank.site not in dict(exchange.members):
        decision = "repeat"  # The site was overtaken; it learns so when it begins again.
    elif exchange.decision is not None:
        decision, chosen = "commit", exchange.decision
    elif request.attempt < exchange.attempt:
        decision = "repeat"
    elif request.phase == "held" and voter in exchange.fetching:
        decision = "fetch"
    elif exchange.averaging is not None and request.phase == "held":
        decision, chosen = "average", exchange.averaging
    else:
        decision = "wait"
        waiting = [rank_text(rank) for rank in exchange.waiting_for(state.voters(exchange))]
    return m.VoteReply.model_validate(
        {
            "decision": decision,
            "set": chosen,
            "attempt": exchange.attempt,
            "epoch": exchange.epoch,
            "waiting_for": waiting,
            "fetches": [
                each.model_dump()
                for each in exchange.fetches
                if decision == "fetch" and each.shard == request.rank.shard
            ],
            "shares": {
                site: by_shard[request.rank.shard] for site, by_shard in exchange.shares.items()
            },
        }
    )


def report_verdicts(
    state: CoordinatorState,
    event: e.Decided,
    report: Callable[[str, int, str, dict[str, Any]], object],
) -> None:
    """Report the verdict about every site's contribution to an exchange, if the set is final.

    `report` is called with site, round, "admission", and a dict of exchange key and verdict.
    """
    exchange = state.exchanges[event.key]
    if exchange.decision is None:
        return
    for site, verdict in exchange.verdicts.items():
        said = {"exchange": event.key, **verdict.model_dump(exclude_none=True)}
        report(site, exchange.round, "admission", said)


def rank_text(rank: RankKey) -> str:
    """Return the text `SITE stage I shard J`."""
    return f"{rank[0]} stage {rank[1]} shard {rank[2]}"


def checkpoints(state: CoordinatorState) -> m.Checkpoints:
    """Return all checkpoints, without those that a resume has superseded."""
    return m.Checkpoints(
        checkpoints=[
            m.Checkpoint(
                tick=tick,
                round=item.round,
                slot=item.slot,
                complete=item.sites is not None,
                sites=item.sites or [],
                written=len(item.written),
                digests={rank_text(rank): digests for rank, digests in item.written.items()},
            )
            for tick, item in sorted(state.checkpoints.items())
        ]
    )


def ledger(state: CoordinatorState) -> m.Ledger:
    """Return the ledger of token ranges."""
    return m.Ledger.model_validate(state.ledger.to_json())


def status(state: CoordinatorState, since: int) -> m.Status:
    """Return an overview of the run, with messages of the feed after number `since`."""
    sites = [
        {
            "site": site.name,
            "incarnation": site.incarnation,
            "role": site.role,
            "reason": site.reason,
            "banned": site.standing.banned,
            "rounds_done": site.rounds_done,
            "metrics": site.metrics,
        }
        for site in state.sites.values()
    ]
    messages = [
        {"sequence": sequence, "time": time, "kind": kind, "text": text}
        for sequence, time, kind, text in state.feed
        if sequence > since
    ]
    return m.Status.model_validate(
        {
            "phase": state.phase,
            "reason": state.reason,
            "run": state.config.run.name,
            "steps": state.config.total_steps,
            "plans": state.next_round,
            "lease": state.lease,
            "stop_tick": state.stop_tick,
            "epoch": epoch(state),
            "sites": sites,
            "messages": messages,
            "sequence": state.sequence,
        }
    )
