"""Ends a run that cannot reach its planned stop, because a site that it needs is lost."""

from __future__ import annotations

from collections.abc import Iterator

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.round_plan import RoundPlan, boundary_slots
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.state import REMEMBERED, CoordinatorState


def ended(state: CoordinatorState, time: float) -> e.Ended | None:
    """Return the event that ends a run whose stop waits for a lost site; None for other runs.

    With fewer sites than `outer.min_sites`, exchanges are not decided and rounds are not planned.
    If the remaining sites need a decision or a plan before the slot of their last checkpoint, they
    would wait forever. If they need none, they write the checkpoint.
    """
    if state.phase != "stopping" or not state.with_role("active"):
        return None
    if len(state.with_role("entering", "active")) >= state.config.outer.min_sites:
        return None
    if any(not state.turned_back(name) for name in state.with_role("finished")):
        return None  # A site has reached the stop, so all decisions before the stop are made.
    if not _waits(state):
        return None
    return e.Ended(time, "stopped", while_waiting(state, state.reason))


def while_waiting(state: CoordinatorState, reason: str) -> str:
    """Return `reason`, with a note that the run waited for sites and with its latest checkpoint."""
    newest = max((at for at, own in state.checkpoints.items() if own.sites), default=None)
    back = "there is no checkpoint" if newest is None else f"checkpoint at slot {newest}"
    return f"{reason}, while the run waited for sites ({back})"


def _waits(state: CoordinatorState) -> bool:
    """Return whether an active site needs a plan or a decision before the stop."""
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
    """Yield every exchange of a round, with the latest tick at which it lands.

    An exchange lands after the plan's delay, or earlier at the next boundary of the same layers.
    """
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
                # With another number of fragments, the first boundary counts; a flush lands all.
                at = 0 if again is None else again[fragment if len(again) == len(begins) else 0]
                tick = min(tick, after.first_tick + at)
            yield ExchangeKey.outer(plan.round, stage, fragment).text, tick


def _decided(state: CoordinatorState, key: str) -> bool:
    return key in state.exchanges and state.exchanges[key].decision is not None
