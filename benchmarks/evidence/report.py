"""Tables of the evidence benchmark: gaps by seed, their mean, and the test of equality."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from benchmarks.evidence.cells import BASELINE, Cell, Group
from benchmarks.evidence.rates import Losses, best_rate, trial_seed

Row = dict[str, Any]
MARGIN = 0.01
"""Largest gap, as a share of the loss of synchronous training, that counts as equal."""
ONE_SIDED_95 = {3: 2.920, 4: 2.353, 5: 2.132}
"""Quantiles of Student's t at 95 %, by number of seeds."""
FEWEST = min(ONE_SIDED_95)
"""Seeds without which a table has no interval and no verdict."""


@dataclass(frozen=True)
class Result:
    """A method in a cell, over the seeds that were trained."""

    cell: Cell
    label: str
    rate: float
    losses: Mapping[int, float | None]
    """Held-out loss by seed; None if training diverged."""
    gaps: Mapping[int, float]
    """Loss over that of synchronous training with the same seed and text, less one."""
    reduction: float | None
    at_end: bool
    """Whether the rate is the lowest or highest one that was tried, where trials end there."""

    @property
    def gap(self) -> float | None:
        """Mean gap. None if a seed diverged or has no synchronous row."""
        whole = self.losses and len(self.gaps) == len(self.losses)
        return statistics.fmean(self.gaps.values()) if whole else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the mean gap at 90 %, from the logarithms of the ratios of seeds.

        None with fewer than `FEWEST` seeds, as the protocol demands.
        """
        if self.gap is None or len(self.gaps) not in ONE_SIDED_95:
            return None
        logs = [math.log1p(gap) for gap in self.gaps.values()]
        reach = ONE_SIDED_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
        middle = statistics.fmean(logs)
        return math.expm1(middle - reach), math.expm1(middle + reach)

    @property
    def verdict(self) -> str:
        """What two one-sided tests at 95 % say with the margin `MARGIN`."""
        found = self.interval
        if found is None:
            return ""
        low, high = found
        if low > -MARGIN and high < MARGIN:
            return "equal"
        if low > 0:
            return "worse"
        return "better" if high < 0 else "undecided"


def trials_of(rows: Sequence[Row], cell: Cell, label: str, seed: int) -> Losses:
    """Return the losses of a seed by inner rate. Infinite if training diverged."""
    found = [row for row in rows if is_of(row, cell, label) and row["seed"] == seed]
    return {
        row["learning_rate"]: math.inf if row["val_loss"] is None else row["val_loss"]
        for row in found
    }


def is_of(row: Row, cell: Cell, label: str) -> bool:
    """Return whether a row is of this method and cell."""
    return row["label"] == label and all(row[key] == value for key, value in cell.key.items())


def results(rows: Sequence[Row], group: Group, starts: Mapping[str, float]) -> list[Result]:
    """Return the results of a group. `starts`: the first rate of each method's trials."""
    synchronous: Mapping[int, Row] = {}
    made = []
    for label in group.labels:
        tried = trials_of(rows, group.cell, label, trial_seed(group.cell, group.seeds))
        rate = best_rate(starts[label], tried)
        own = [
            row
            for row in rows
            if is_of(row, group.cell, label)
            and row["learning_rate"] == rate
            and row["seed"] in group.seeds
        ]
        losses = {row["seed"]: row["val_loss"] for row in own}
        if label == BASELINE:
            synchronous = {row["seed"]: row for row in own}
        gaps = {
            row["seed"]: row["val_loss"] / base["val_loss"] - 1
            for row in own
            if (base := synchronous.get(row["seed"])) is not None
            and row["val_loss"] is not None
            and base["val_loss"] is not None
            and row.get("text") == base.get("text")
        }
        less = [row["reduction_total"] for row in own if row["reduction_total"]]
        ends = len(tried) > 1 and rate in (min(tried), max(tried))
        reduction = statistics.fmean(less) if less else None
        made.append(Result(group.cell, label, rate, losses, gaps, reduction, ends))
    return made


def mixed_commits(rows: Sequence[Row], group: Group) -> list[str]:
    """Return a line for each seed whose rows in the group's cell are of several commits.

    Gaps of such a seed may be of the engine's change, and not of the methods.
    """
    found: dict[int, set[str]] = {}
    for row in rows:
        if row["seed"] in group.seeds and any(
            is_of(row, group.cell, each) for each in group.labels
        ):
            found.setdefault(row["seed"], set()).add(str(row.get("commit")))
    return [
        f"rows of seed {seed} are of several commits: {', '.join(sorted(names))}"
        for seed, names in sorted(found.items())
        if len(names) > 1
    ]


def table(known: Sequence[Result]) -> str:
    """Return the results of one cell as text."""
    lines = []
    for result in known:
        found = result.interval
        lines.append(
            {
                "method": result.label,
                "rate": f"{result.rate:g}{' (end)' if result.at_end else ''}",
                "in all": result.reduction,
                "loss": _mean_loss(result),
                "gap": result.gap,
                "by seed": " ".join(f"{gap:+.1%}" for gap in result.gaps.values()),
                "90 %": None if found is None else f"{found[0]:+.1%} to {found[1]:+.1%}",
                "verdict": result.verdict,
            }
        )
    columns = {
        "method": "s",
        "rate": "s",
        "in all": ",.0f",
        "loss": ".4f",
        "gap": "+.2%",
        "by seed": "s",
        "90 %": "s",
        "verdict": "s",
    }
    return common.table(lines, columns)


def _mean_loss(result: Result) -> float | None:
    losses = [loss for loss in result.losses.values() if loss is not None]
    return statistics.fmean(losses) if losses and len(losses) == len(result.losses) else None
