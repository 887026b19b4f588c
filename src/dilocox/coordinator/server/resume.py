"""Going on from a checkpoint: what of the log is in force again."""

from __future__ import annotations

import math

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.schedule import boundary_slots
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
    """The event that rolls the run of `log` back to the checkpoint at `tick` (none: the latest).

    `state`: what the log adds up to. Plans of rounds up to the checkpoint's are kept as recorded;
    later ones are superseded, and the
    ledger is as it was when the checkpoint was complete, without them, and with the ranges of the
    recorded plans in the hands of those who have the checkpoint. Raises `CheckpointError`.
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
    # Ledgers do not forget: what is begun from must have planned none of the later rounds.
    number, rolled = start_of(
        config, log, end, lambda before: before.next_round <= checkpoint.round + 1
    )
    rolled.ledger.until = checkpoint.round
    for event in log.events(number, end):
        rolled.apply(event)
    # A site may have written its part, and died before all others had: it goes on, too.
    whole = [
        site
        for site in rolled.sites
        if all((site, *rank) in checkpoint.written for rank in rolled.ranks)
    ]
    rolled.ledger.settle(checkpoint.round, whole)
    rolled.ledger.reopen(checkpoint.round, whole)
    # Exchanges reach back a round or two; older plans are only of interest to who reads the log.
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
    """The gate's running means without the exchanges that had not landed by the slot end `tick`:
    those are judged again."""
    usual = dict(state.usual)
    decided = [each for each in state.exchanges.values() if each.decision is not None]
    landed = set()
    for exchange in sorted(decided, key=lambda each: each.round, reverse=True):
        key, plan = ExchangeKey.parse(exchange.key), state.plans[exchange.round]
        if key.kind != "outer" or exchange.place in landed:
            continue
        boundary = math.inf  # the flush comes after every checkpoint
        if plan.kind == "train":
            slots = boundary_slots(key.stage, state.config.site.stages, plan.fragments, plan.slots)
            boundary = plan.first_tick + slots[key.fragment]
        if boundary + plan.delay > tick:
            usual[exchange.place] = exchange.usual_before
        if boundary <= tick:
            # Those before it landed when it began, or sooner.
            landed.add(exchange.place)
    return usual
