"""When a run ends before its planned steps are done: by `evaluation.patience`, or by a callback.

An early end is a flush in place of the next round that has no plan yet. What sites report of the
held-out loss is their own word, so each site has a series of its own, and a majority decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.held_out import HeldOut
from dilocox.coordinator.server.state_fields import Facts

KINDS = ("first_evaluation", "evaluation", "peer_evaluation")
"""Reports of a held-out loss; `peer_evaluation`: by a site that is not the first of the plan."""


def note(state: Facts, event: e.Reported) -> None:
    """Take up what a report says of the held-out loss, if it says anything of it."""
    if event.kind not in KINDS:
        return
    known = state.held_out.setdefault(event.site, HeldOut())
    if event.kind != "first_evaluation":
        known.take(event.metrics.get("val_loss"))
    if event.kind != "peer_evaluation" and event.metrics.get("ends") is True:
        known.asks = _may_ask(state, event)


def _may_ask(state: Facts, event: e.Reported) -> bool:
    """A callback speaks at the site that the plan lets evaluate, and for that evaluation alone."""
    plan = state.plans.get(event.round)
    if plan is None or next(iter(plan.members), None) != event.site:
        return False
    return plan.evaluate if event.kind == "evaluation" else event.round == 0


def due(state: Facts, time: float) -> e.EndingEarly | None:
    """The event that ends the run early, if it has to end."""
    if state.ends_early or state.flush_planned or state.phase != "running":
        return None
    active = state.with_role("active")
    for name in active:
        if name in state.held_out and state.held_out[name].asks:
            return e.EndingEarly(time, f"{name}: on_evaluation returned True")
    patience = state.config.evaluation.patience
    if not patience:
        return None
    stale = [n for n in active if n in state.held_out and state.held_out[n].stale >= patience]
    if 2 * len(stale) <= len(active):
        return None
    lowest = min(best for n in stale if (best := state.held_out[n].best) is not None)
    return e.EndingEarly(
        time,
        f"no lower held-out loss than {lowest:.4f} in the last {patience} evaluations "
        f"(evaluation.patience), at {', '.join(stale)}"[:400],
    )


def to_log(state: Facts) -> dict[str, dict[str, Any]]:
    """What is known of held-out losses, by site, for the log."""
    return {name: asdict(known) for name, known in state.held_out.items()}


def from_log(found: Mapping[str, Mapping[str, Any]]) -> dict[str, HeldOut]:
    """Inverse of `to_log`."""
    return {name: HeldOut(**fields) for name, fields in found.items()}
