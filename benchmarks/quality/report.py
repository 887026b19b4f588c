"""Evaluates the rows of the quality benchmark: gaps, means over seeds, table and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from benchmarks.quality.rows import BASELINES

Row = dict[str, Any]
Cell = tuple[str, int, bool]
"""Regime, number of sites, IID."""
OURS = "dilocox"
PAPER = "dilocox-paper"
NEEDED_REDUCTION = 500
NEEDED_SHARE = 0.25
"""Share of the gap of the paper's method that dilocox may have at `NEEDED_REDUCTION` or more."""


def cell(row: Row) -> Cell:
    """Return the cell of a row. Rows of one cell may be compared with each other."""
    return row["regime"], row["sites"], row["iid"]


def with_gaps(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with `gap`: loss over that of synchronous training, less one.

    The synchronous row has the same inner optimizer, text, steps and seed. The gap is None if one
    of the two rows has no loss. It is None, too, if the row names its text and the synchronous row
    has another.
    """
    baselines = {
        _baseline_key(row): row for row in rows if row["label"] == BASELINES.get(row["optimizer"])
    }
    done = []
    for row in rows:
        base = baselines.get(_baseline_key(row))
        done.append({**row, "gap": None if base is None else _gap(row, base)})
    return done


def _baseline_key(row: Row) -> tuple[object, ...]:
    return cell(row), row["seed"], row["optimizer"], row.get("steps")


def _gap(row: Row, base: Row) -> float | None:
    loss, best = row["val_loss"], base["val_loss"]
    # Rows of earlier versions do not name their text; docs/notes/quality.md has the effect.
    same = "text" not in row or row["text"] == base.get("text")
    return loss / best - 1 if same and loss is not None and best is not None else None


@dataclass(frozen=True)
class Point:
    """An entry in one cell, over its seeds. Loss and gap are means; None if a run diverged."""

    label: str
    method: str
    group: str
    cell: Cell
    loss: float | None
    loss_range: float
    """Largest loss minus smallest loss."""
    gap: float | None
    reduction: float
    per_transfer: float | None
    inner_steps: float | None
    failed: int
    """Number of runs that diverged."""
    by_seed: Mapping[int, float | None]
    """Loss of each seed."""

    @property
    def seeds(self) -> int:
        """Number of runs."""
        return len(self.by_seed)

    def loss_of(self, seeds: Iterable[int]) -> float | None:
        """Return the mean loss over `seeds`. None without seeds, or if one of them has no loss."""
        return _mean(_all([self.by_seed[seed] for seed in seeds]))


def points(rows: Iterable[Row]) -> list[Point]:
    """Return one point for the rows of each entry and cell, in order of first appearance."""
    groups: dict[tuple[str, Cell], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["label"], cell(row)), []).append(row)
    return [_point(group) for group in groups.values()]


def _point(rows: list[Row]) -> Point:
    first = rows[0]
    losses = _all([row["val_loss"] for row in rows])
    gaps = _all([row["gap"] for row in rows])
    reductions = [row["reduction_total"] or 1.0 for row in rows]
    transfers = _all([row["reduction_per_transfer"] for row in rows])
    steps = _all([row["inner_steps"] for row in rows])
    return Point(
        first["label"],
        first["method"],
        first["group"],
        cell(first),
        _mean(losses),
        max(losses) - min(losses) if losses else 0.0,
        _mean(gaps),
        statistics.fmean(reductions),
        _mean(transfers),
        _mean(steps),
        sum(row["failed"] is not None for row in rows),
        {row["seed"]: row["val_loss"] for row in rows},
    )


def _all(values: list[float | None]) -> list[float]:
    """Return the values, or none if one is None: a mean of the others would look too good."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def title(where: Cell) -> str:
    """Return a cell in words."""
    regime, sites, iid = where
    return f"regime {regime}, D={sites}, {'IID' if iid else 'non-IID'}"


def cells(known: Iterable[Point]) -> list[Cell]:
    """Return the cells of the points, in order."""
    return list(dict.fromkeys(point.cell for point in known))


def table(known: Sequence[Point]) -> str:
    """Return all points of one cell as text."""
    rows = [
        {
            "method": point.label,
            "H": point.inner_steps,
            "per transfer": point.per_transfer,
            "in all": point.reduction,
            "loss": point.loss,
            "range": point.loss_range if point.seeds > 1 and point.loss is not None else None,
            "gap": point.gap,
            "seeds": point.seeds,
            "diverged": point.failed or None,
        }
        for point in known
    ]
    columns = {
        "method": "s",
        "H": ".1f",
        "per transfer": ",.1f",
        "in all": ",.0f",
        "loss": ".4f",
        "range": ".4f",
        "gap": "+.2%",
        "seeds": "d",
        "diverged": "d",
    }
    return common.table(rows, columns)


def verdicts(known: Sequence[Point]) -> list[str]:
    """Return sentences about the points of one cell, with the good figures and the bad ones."""
    core = [point for point in known if point.group == "core"]
    ours = [point for point in core if point.method == OURS]
    lines = [_against_paper(ours, point) for point in core if point.method == PAPER]
    rivals = [point for point in core if point.method not in (OURS, "allreduce")]
    return lines + [_domination(ours, rival) for rival in rivals]


def _against_paper(ours: list[Point], paper: Point) -> str:
    name = f"{paper.label} at {paper.reduction:,.0f}x"
    far = [p for p in ours if p.reduction >= NEEDED_REDUCTION and p.gap is not None]
    if not far:
        return f"{name}: no dilocox point at {NEEDED_REDUCTION}x or more: nothing to compare"
    best = min(far, key=lambda point: point.gap or 0.0)
    assert best.gap is not None
    said = f"{best.label}: gap {best.gap:+.2%} at {best.reduction:,.0f}x"
    if paper.gap is None:
        return f"{said}; {name} {_lossless(paper)}"
    allowed = paper.gap * NEEDED_SHARE
    met = "reached" if best.gap <= allowed else "MISSED"
    return (
        f"{said}; {name} has {paper.gap:+.2%}, a quarter of that is {allowed:+.2%}: "
        f"{met}{_share(best.gap, paper.gap)}"
    )


def _share(gap: float, of: float) -> str:
    return f" ({gap / of:.2f} of its gap)" if of > 0 and gap > 0 else ""


def _lossless(point: Point) -> str:
    if point.failed:
        return f"diverged ({point.failed} of {point.seeds} runs)"
    return "has no gap: its synchronous row is missing"


def _domination(ours: list[Point], rival: Point) -> str:
    """Return a sentence: whether a dilocox point of at least the rival's reduction has less loss.

    Only seeds that both have are compared, because the text of a seed alone moves losses by some
    per cent. Points that share the most seeds with the rival come first, then the best of them.
    """
    name = f"{rival.label} ({_number(rival.loss)} at {rival.reduction:,.0f}x)"
    if rival.loss is None:
        return f"{name}: {_lossless(rival)}"
    against = []
    for point in ours:
        shared = sorted(point.by_seed.keys() & rival.by_seed.keys())
        own, other = point.loss_of(shared), rival.loss_of(shared)
        if point.reduction >= rival.reduction and own is not None and other is not None:
            against.append((own > other, -len(shared), own / other, point, shared, own, other))
    if not against:
        return f"{name}: NOT dominated, no dilocox point has its reduction"
    above, *_, best, shared, own, other = min(against, key=lambda each: each[:3])
    seen = f"{best.label} ({_number(own)} at {best.reduction:,.0f}x)"
    if not len(shared) == rival.seeds == best.seeds:
        seen += f" against {_number(other)}, over seed {' and '.join(map(str, shared))}"
    if above:
        return f"{name}: NOT dominated, the best at its reduction is {seen}"
    return f"{name}: dominated by {seen}"


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
