"""Table of the fine-tuning benchmark: loss against synchronous training, bytes, task."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.finetune.rows import BASELINE, UNQUOTED

Row = dict[str, Any]


def summarised(rows: Sequence[Row], parameters: Mapping[str, int]) -> list[Row]:
    """Return one line per mode, number of sites and entry, over the seeds.

    `gap` is the mean over seeds of the loss over that of synchronous training of the same mode,
    sites and seed, less one; `gap_spread` is the half range. `of_full` is the reduction against
    synchronous training of all parameters. Rows of trials and of the study do not count.
    """
    quoted = [row for row in rows if row["seed"] not in UNQUOTED]
    cells: dict[tuple[str, int, str], list[Row]] = {}
    for row in quoted:
        cells.setdefault((row["mode"], row["sites"], row["label"]), []).append(row)
    lines = []
    for (mode, sites, label), mine in cells.items():
        gaps = [gap for row in mine if (gap := _gap(row, quoted)) is not None]
        losses = [row["val_loss"] for row in mine if row["val_loss"] is not None]
        right = [row["accuracy"] for row in mine if row["accuracy"] is not None]
        reduction = _mean([row["reduction_total"] for row in mine if row["reduction_total"]])
        more = parameters["full"] / parameters[mode]
        lines.append(
            {
                "mode": mode,
                "sites": sites,
                "label": label,
                "seeds": len(mine),
                "learning_rate": mine[0]["learning_rate"],
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
        "seeds": "",
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
    for other in rows:
        same = all(other[key] == row[key] for key in ("mode", "sites", "seed", "steps"))
        if same and other["label"] == BASELINE and other["val_loss"] and row["val_loss"]:
            return float(row["val_loss"] / other["val_loss"] - 1)
    return None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
