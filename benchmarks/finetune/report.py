"""Table of the fine-tuning benchmark: loss against synchronous training, bytes, task."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.finetune.rows import BASELINE, UNQUOTED

Row = dict[str, Any]
CELL = ("mode", "sites", "label", "steps", "learning_rate", "precision")
"""Fields that are equal in rows that are averaged."""
COMPARED = ("mode", "sites", "seed", "steps", "precision", "text")
"""Fields that are equal in a row and in the synchronous row that it is compared with."""


def summarised(rows: Sequence[Row], parameters: Mapping[str, int]) -> list[Row]:
    """Return one line per mode, sites, entry, steps, learning rate and precision, over the seeds.

    `gap` is the mean over seeds of the loss over that of synchronous training of the same mode,
    sites, steps, precision, seed and text, less one; `gap_spread` is the half range. Loss, gap and
    accuracy are None if a seed lacks them: a mean of the others would look too good. `of_full` is
    the reduction against synchronous training of all parameters. Rows of trials and of the study do
    not count.
    """
    quoted = [row for row in rows if row["seed"] not in UNQUOTED]
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in quoted:
        cells.setdefault(tuple(row[key] for key in CELL), []).append(row)
    lines = []
    for cell, mine in cells.items():
        mode = cell[0]
        gaps = _all([_gap(row, quoted) for row in mine])
        losses = _all([row["val_loss"] for row in mine])
        right = _all([row["accuracy"] for row in mine])
        reduction = _mean([row["reduction_total"] for row in mine if row["reduction_total"]])
        more = parameters["full"] / parameters[mode]
        lines.append(
            {
                **dict(zip(CELL, cell, strict=True)),
                "seeds": len({row["seed"] for row in mine}),
                "diverged": sum(row["val_loss"] is None for row in mine) or None,
                "val_loss": _mean(losses),
                "gap": _mean(gaps),
                "gap_spread": (max(gaps) - min(gaps)) / 2 if gaps else None,
                "reduction": reduction,
                "of_full": None if reduction is None else reduction * more,
                "accuracy": _mean(right),
            }
        )
    return lines


def table(rows: Sequence[Row], parameters: Mapping[str, int]) -> str:
    """Return the lines of `summarised` as aligned text."""
    columns: dict[str, Any] = {
        "mode": "",
        "sites": "",
        "label": "",
        "steps": "",
        "precision": "",
        "seeds": "",
        "diverged": "",
        "learning_rate": "g",
        "val_loss": ".4f",
        "gap": "+.2%",
        "gap_spread": ".2%",
        "reduction": ",.1f",
        "of_full": ",.0f",
        "accuracy": ".1%",
    }
    return common.table(summarised(rows, parameters), columns)


def _gap(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the gap to the best synchronous row. None if one of the two rows has no loss."""
    same = [other for other in rows if all(other.get(key) == row.get(key) for key in COMPARED)]
    bases = [other["val_loss"] for other in same if other["label"] == BASELINE]
    if row["val_loss"] is None or not bases or None in bases:
        return None
    return float(row["val_loss"] / min(bases) - 1)


def _all(values: Sequence[float | None]) -> list[float]:
    """Return the values, or none if one is None."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
