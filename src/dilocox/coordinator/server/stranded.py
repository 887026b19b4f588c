"""A run that is to stop and cannot reach its stop, because a site that it needs is gone."""

from __future__ import annotations

from collections.abc import Iterator

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import RoundPlan
from dilocox.coordinator.protocol.schedule import boundary_slots
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.state import REMEMBERED, CoordinatorState


def ended(state: CoordinatorState, time: float) -> e.Ended | None:
    """The event that ends a run whose stop waits for a site that is gone; None for other runs.

    With fewer sites than `outer.min_sites` nothing is decided. Where the others still need a
    decision, or a plan, before the slot at which all write a checkpoint, they would wait for ever.
    Where they need none, they write it.
    """
    if state.phase != "stopping" or not state.with_role("active"):
        return None
    if len(state.with_role("entering", "active")) >= state.config.outer.min_sites:
        return None
    if any(not state.turned_back(name) for name in state.with_role("finished")):
        return None  # it has reached the stop, so all that is needed for that is decided
    if not _waits(state):
        return None
    return e.Ended(time, "stopped", while_waiting(state, state.reason))


def while_waiting(state: CoordinatorState, reason: str) -> str:
    """`reason` of an end without a checkpoint of that moment, with the one to go back to."""
    newest = max((at for at, own in state.checkpoints.items() if own.sites), default=None)
    back = "there is no checkpoint" if newest is None else f"checkpoint at slot {newest}"
    return f"{reason}, while the run waited for sites ({back})"


def _waits(state: CoordinatorState) -> bool:
    """Whether an active site needs a plan, or a decision, before the stop."""
    stop = state.stop_tick or 0
    last = state.plans.get(state.next_round - 1)
    if last is None or (last.kind == "train" and last.first_tick + last.slots < stop):
        return True
    if state.config.exchanges_gradients:
        return bool(state.undecided)
    oldest = state.next_round - 1 - REMEMBERED
    return any(
        state.first_tick < tick <= stop and not _decided(state, key)
        for number, plan in state.plans.items()
        if number >= oldest
        for key, tick in _landings(state, plan)
    )


def _landings(state: CoordinatorState, plan: RoundPlan) -> Iterator[tuple[str, int]]:
    """Every exchange of a round, and the tick at which it lands at the latest: at the next boundary
    of what it holds, where that comes before the delay is over."""
    stages, after = state.config.site.stages, state.plans.get(plan.round + 1)
    for stage in range(stages):
        if plan.kind == "flush":
            begins = [0] * plan.fragments
        else:
            begins = boundary_slots(stage, stages, plan.fragments, plan.slots)
        again = None
        if after is not None and after.kind == "train":
            again = boundary_slots(stage, stages, after.fragments, after.slots)
        for fragment, slot in enumerate(begins):
            tick = plan.first_tick + slot + plan.delay
            if after is not None:
                # Another number of fragments divides the model otherwise; a flush lands all.
                at = 0 if again is None else again[fragment if len(again) == len(begins) else 0]
                tick = min(tick, after.first_tick + at)
            yield ExchangeKey.outer(plan.round, stage, fragment).text, tick


def _decided(state: CoordinatorState, key: str) -> bool:
    return key in state.exchanges and state.exchanges[key].decision is not None
