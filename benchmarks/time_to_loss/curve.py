"""The course of a run: its evaluations in time, and when a loss is reached. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dilocox.errors import DilocoxError

Record = dict[str, Any]
RUNNING = ("message", "running")
"""Kind and text of the record with which training begins."""
Curve = list[tuple[float, int, float]]
"""(seconds since training began, inner steps, held-out loss) of each evaluation, in order."""


def curve(records: Sequence[Record]) -> Curve:
    """Return the evaluations of a run. Raises `DilocoxError` if training never began."""
    began = [r["time"] for r in records if (r["kind"], r.get("text")) == RUNNING]
    if not began:
        raise DilocoxError("the run's metrics do not say when training began")
    return [
        (record["time"] - began[0], int(record["step"]), float(record["val_loss"]))
        for record in records
        if record["kind"] == "evaluation"
    ]


def written(points: Curve) -> str:
    """Return a curve as text: `seconds/step/loss`, separated by spaces."""
    return " ".join(f"{seconds:.2f}/{step}/{loss:.8f}" for seconds, step, loss in points)


def read(text: str) -> Curve:
    """Return the curve that `written` has written."""
    points = (word.split("/") for word in text.split())
    return [(float(seconds), int(step), float(loss)) for seconds, step, loss in points]


def seconds_to(points: Curve, loss: float) -> float | None:
    """Return the seconds after which a run has `loss`, interpolated between evaluations.

    None if no evaluation has it.
    """
    found = _first(points, loss)
    return None if found is None else found[0]


def steps_to(points: Curve, loss: float) -> float | None:
    """Return the inner steps after which a run has `loss`. None if no evaluation has it."""
    found = _first(points, loss)
    return None if found is None else found[1]


def _first(points: Curve, loss: float) -> tuple[float, float] | None:
    """Return (seconds, steps) at which a curve first comes down to `loss`."""
    before = None
    for seconds, step, value in points:
        if value <= loss:
            if before is None:
                return seconds, float(step)
            share = (before[2] - loss) / (before[2] - value)
            return (
                before[0] + share * (seconds - before[0]),
                before[1] + share * (step - before[1]),
            )
        before = (seconds, step, value)
    return None
