"""When a run ends before its planned steps are done: by `evaluation.patience`, or by a callback.

A run ends early by a flush in place of the next round that has no plan yet. Held-out losses are
claims of the sites, so each site has its own series, and a majority of the sites decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.held_out import HeldOut
from dilocox.coordinator.server.state_fields import Facts

KINDS = ("first_evaluation", "evaluation", "peer_evaluation")
"""Kinds of reports with a held-out loss. A `peer_evaluation` is that of a site which is not the
first of the plan."""


def note(state: Facts, event: e.Reported) -> None:
    """Note the held-out loss of a report, if it has one, and a request to end the run."""
    if event.kind not in KINDS:
        return
    known = state.held_out.setdefault(event.site, HeldOut())
    if event.kind != "first_evaluation":
        known.take(event.round, event.metrics.get("val_loss"))
    if event.kind != "peer_evaluation" and event.metrics.get("ends") is True:
        known.asks = _may_ask(state, event)


def _may_ask(state: Facts, event: e.Reported) -> bool:
    """Return whether the report's site may ask to end the run.

    Only the first site of the round's plan may: with an "evaluation" if the plan evaluates, or with
    a "first_evaluation" in round 0.
    """
    plan = state.plans.get(event.round)
    if plan is None or next(iter(plan.members), None) != event.site:
        return False
    return plan.evaluate if event.kind == "evaluation" else event.round == 0


def due(state: Facts, time: float) -> e.EndingEarly | None:
    """Return the event that ends the run early, or None."""
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
    """Return the held-out losses by site, as JSON values for the log."""
    return {name: asdict(known) for name, known in state.held_out.items()}


def from_log(found: Mapping[str, Mapping[str, Any]]) -> dict[str, HeldOut]:
    """Inverse of `to_log`."""
    return {name: HeldOut(**fields) for name, fields in found.items()}
