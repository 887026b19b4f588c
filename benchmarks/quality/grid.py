"""The grid of runs for the controller's loss table, and the computation of the table.

There are three kinds of runs, each with one seed. Dense rounds of H steps without overlap give the
cost of local steps. The same rounds with late landings give the cost of delay. The same rounds with
a codec give the cost of the codec. All use the outer rates, residual decay and kept progress of the
table. The cost of a part is the rise of the loss over the run without it, so that the three costs
add up, as the controller adds them.

One seed changes a loss by one or two per cent, but the controller needs a consistent order. Running
maxima therefore make costs rise with H and with delay, and fall with density. Rounds that are too
long for a short run keep their old values in the table, raised to the last measured value.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.quality.rows import DENSE, LEAD, REGIMES, Entry, Settings
from dilocox.coordinator.controller import loss_model

Row = Mapping[str, Any]
Table = dict[str, Any]

INNER_STEPS = (1, 2, 5, 10, 20)
KEPT = (5, 20, 82)
FLAT = {"int2": (2, 20)}
"""By codec: inner steps at which it is measured. Finer codecs cost less than a seed does."""
SHARES = (0.5, 1.0)
"""Measured delays as shares of the round, for rounds of at least `SHORTEST_LATE` steps."""
SHORTEST_LATE = 2
LEAST = 1e-4
"""Least cost in the table, where zero or less was measured: the controller needs logarithms."""
SYNCHRONOUS = "grid synchronous"
ABOUT = (
    "Predicted rise of the held-out loss over synchronous training with the same inner optimizer, "
    "as a share of that loss; parts add up: local + delay + codec. Made by "
    "`python -m benchmarks.quality --loss-table` from real runs of a model of 0.67M parameters on "
    "4 sites with different text; rounds of 50 steps and more, and codecs of 4 bits and more, are "
    "estimated."
)


def entries() -> list[Entry]:
    """Return all runs of the grid, the synchronous run first."""
    found = [Entry(SYNCHRONOUS, "allreduce", DENSE, "allreduce", group="ablations")]
    found += [_entry(steps, "none") for steps in INNER_STEPS]
    found += [_entry(steps, f"topk:{kept}") for steps in INNER_STEPS for kept in KEPT]
    found += [_entry(steps, codec) for codec, lengths in FLAT.items() for steps in lengths]
    late = [steps for steps in INNER_STEPS if steps >= SHORTEST_LATE]
    return found + [_entry(steps, "none", share) for steps in late for share in SHARES]


def label(inner_steps: int, codec: str, share: float = 0.0) -> str:
    """Return the name of a run of the grid."""
    late = f" {share:g} late" if share else ""
    return f"grid H={inner_steps} {codec}{late}"


def _entry(inner_steps: int, codec: str, share: float = 0.0) -> Entry:
    whole = REGIMES[LEAD[0]].steps
    rate, momentum = loss_model.outer_rates(inner_steps, codec, whole)
    settings: Settings = {
        "control.adapt": "off",
        "outer.inner_steps": inner_steps,
        "outer.fragments": 1,
        "outer.overlap": "keep" if share else "none",
        "outer.delay": round(share * inner_steps),
        "outer.keep": loss_model.kept_progress(inner_steps, share, codec),
        "outer.learning_rate": rate,
        "outer.momentum": momentum,
        "compression.codec": codec,
        "compression.residual_decay": loss_model.residual_decay(inner_steps, codec, whole),
        "compression.residual_view": loss_model.residual_view(inner_steps, codec, whole),
    }
    return Entry(
        label(inner_steps, codec, share), "dilocox", settings, "dilocox", group="ablations"
    )


def measured_table(rows: Sequence[Row], before: Table, about: str) -> Table:
    """Return the loss table with all cells that `rows` measure; other cells are those of `before`.

    Raises `ValueError` if a run of the grid has no row, or has diverged.
    """
    losses = {row["label"]: row["val_loss"] for row in rows}
    for entry in entries():
        if entry.label not in losses:
            raise ValueError(f"{entry.label} has no row: the grid is not complete")
        if losses[entry.label] is None:
            raise ValueError(f"{entry.label} has diverged: it has no loss to make a table of")

    def rise(name: str, over: str) -> float:
        return max(0.0, float(losses[name]) / float(losses[over]) - 1)

    table = copy.deepcopy(before)
    table["about"] = about
    every = table["inner_steps"]
    local = {steps: rise(label(steps, "none"), SYNCHRONOUS) for steps in INNER_STEPS}
    table["local"] = _rising(_column(every, local, before["local"]))
    late = [
        {h: rise(label(h, "none", s), label(h, "none")) for h in INNER_STEPS if h >= SHORTEST_LATE}
        for s in SHARES
    ]
    table["delay"] = _delays(every, late, before["delay"])
    table["flat"] |= {
        codec: _rising(
            _column(
                every,
                {h: max(LEAST, rise(label(h, codec), label(h, "none"))) for h in lengths},
                before["flat"][codec],
            )
        )
        for codec, lengths in FLAT.items()
    }
    table["topk"] = _densities(
        every,
        {
            kept: {
                h: max(LEAST, rise(label(h, f"topk:{kept}"), label(h, "none"))) for h in INNER_STEPS
            }
            for kept in KEPT
        },
        before["topk"],
    )
    return table


def as_text(table: Table) -> str:
    """Return the table as JSON, with one row of numbers per line."""
    text = json.dumps(table, indent=2)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _one_line, text) + "\n"


def _one_line(found: re.Match[str]) -> str:
    return "[" + ", ".join(part.strip() for part in found.group(1).split(",")) + "]"


def _column(
    every: Sequence[int], known: Mapping[int, float], before: Sequence[float]
) -> list[float]:
    """Return the measured value for each element of `every`, or else the value of `before`."""
    return [known.get(steps, old) for steps, old in zip(every, before, strict=True)]


def _rising(values: Sequence[float]) -> list[float]:
    """Return the running maximum, rounded to four digits."""
    found: list[float] = []
    for value in values:
        found.append(round(max(value, found[-1] if found else 0.0), 4))
    return found


def _delays(
    every: Sequence[int], late: Sequence[Mapping[int, float]], before: Table
) -> dict[str, Any]:
    """Return the cost by inner steps and share of the round.

    Between no delay and the first measured share the shape of the old table is kept, scaled.
    """
    shares = before["share"]
    rows = []
    for steps, old in zip(every, before["loss"], strict=True):
        if steps not in late[0]:
            rows.append(list(old))
            continue
        known = {share: values[steps] for share, values in zip(SHARES, late, strict=True)}
        row = []
        for share, value in zip(shares, old, strict=True):
            if share in known:
                row.append(known[share])
            else:
                of = old[shares.index(SHARES[0])]
                row.append(known[SHARES[0]] * value / of if of else 0.0)
        rows.append(_rising(row))
    return {"share": list(shares), "loss": rows}


def _densities(
    every: Sequence[int], known: Mapping[int, Mapping[int, float]], before: Table
) -> dict[str, Any]:
    """Return the cost of top-k by inner steps and kept values.

    The cost is linear in both logarithms between measured densities. Beyond them it has the slope
    of the nearest two.
    """
    kept = before["kept"]
    rows: list[list[float]] = []
    for steps, old in zip(every, before["loss"], strict=True):
        row = list(old)
        if steps in known[KEPT[0]]:
            points = [(math.log(k), math.log(known[k][steps])) for k in KEPT]
            row = [math.exp(_through(points, math.log(k))) for k in kept]
        below = rows[-1] if rows else [LEAST] * len(kept)
        row = [max(value, under) for value, under in zip(row, below, strict=True)]
        rows.append([round(value, 5) for value in reversed(_rising_exact(row[::-1]))])
    return {"kept": list(kept), "loss": rows}


def _rising_exact(values: Sequence[float]) -> list[float]:
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] if found else LEAST))
    return found


def _through(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the piecewise linear function through `points` at `x`.

    The first and the last piece are extended beyond the points.
    """
    pieces = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((piece for piece in pieces if x <= piece[1][0]), pieces[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
