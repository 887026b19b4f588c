"""Resuming from a checkpoint: which parts of the logged state are restored."""

from __future__ import annotations

import math

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.early_end import to_log
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.restore import start_of
from dilocox.coordinator.server.state import REMEMBERED, CoordinatorState
from dilocox.errors import CheckpointError


def resume_point(
    config: RunConfig,
    log: EventLog,
    state: CoordinatorState,
    time: float,
    tick: int | None = None,
) -> e.Resumed:
    """Return the event that resumes the run from a checkpoint.

    Plans up to the checkpoint's round are restored; later ones no longer count. The ledger is
    restored as it was when the checkpoint was complete, without later plans. The ranges of the
    restored plans belong to the sites that have the checkpoint.

    Args:
        config: The run file.
        log: The event log.
        state: State after all events of the log.
        time: Unix seconds, to stamp the event.
        tick: Tick of the checkpoint; None: the latest complete one.

    Raises:
        CheckpointError: There is no such complete checkpoint.
    """
    complete = [at for at, item in state.checkpoints.items() if item.sites is not None]
    if tick is None and complete:
        tick = max(complete)
    if tick is None or tick not in complete:
        there = ", ".join(map(str, sorted(complete))) or "none"
        wanted = "" if tick is None else f" at slot {tick}"
        raise CheckpointError(
            f"run {config.run.name}: no complete checkpoint{wanted} (there are: {there}); "
            "choose one of these, or start anew in another folder"
        )
    end, checkpoint = log.last_kept(tick), state.checkpoints[tick]
    # A ledger keeps all ranges, so the snapshot to start from must not have planned later rounds.
    number, rolled = start_of(
        config, log, end, lambda before: before.next_round <= checkpoint.round + 1
    )
    rolled.ledger.until = checkpoint.round
    for event in log.events(number, end):
        rolled.apply(event)
    # A site that wrote its part and died before all others had can resume, too.
    whole = [
        site
        for site in rolled.sites
        if all((site, *rank) in checkpoint.written for rank in rolled.ranks)
    ]
    rolled.ledger.settle(checkpoint.round, whole)
    rolled.ledger.reopen(checkpoint.round, whole)
    # Exchanges in flight reach back a round or two, so older plans are not needed.
    recent = range(checkpoint.round - REMEMBERED, checkpoint.round + 1)
    plans = [rolled.plans[round_] for round_ in recent if round_ in rolled.plans]
    return e.Resumed(
        time,
        tick,
        checkpoint.round,
        checkpoint.slot,
        [plan.model_dump(mode="json") for plan in plans],
        rolled.ledger.to_json(),
        [
            (round_, site, measured.model_dump(mode="json"))
            for round_, sites in rolled.measured.items()
            for site, measured in sites.items()
            if round_ < checkpoint.round
        ],
        usual_at(rolled, tick),
        to_log(rolled),
        rolled.ends_early,
    )


def usual_at(state: CoordinatorState, tick: int) -> dict[str, int | None]:
    """Return the gate's running means at the slot end `tick`.

    Exchanges that had not landed by then are left out, because they are judged again.
    """
    usual = dict(state.usual)
    decided = [each for each in state.exchanges.values() if each.decision is not None]
    landed = set()
    for exchange in sorted(decided, key=lambda each: each.round, reverse=True):
        key, plan = ExchangeKey.parse(exchange.key), state.plans[exchange.round]
        if key.kind != "outer" or exchange.place in landed:
            continue
        boundary = math.inf  # The flush comes after every checkpoint.
        if plan.kind == "train":
            slots = boundary_slots(key.stage, state.config.site.stages, plan.fragments, plan.slots)
            boundary = plan.first_tick + slots[key.fragment]
        if boundary + plan.delay > tick:
            usual[exchange.place] = exchange.usual_before
        if boundary <= tick:
            # Earlier exchanges of this place had landed when this one began.
            landed.add(exchange.place)
    return usual
