"""Figures of an evaluation on tasks: from lm-eval's results to a report, and to lines for people.

A report is untrusted input for its readers: a value of the wrong type is left out. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.utils.plain_text import plain

SHOWN = 8
"""Most figures in one line for people."""
_LONGEST, _MOST, _LARGEST = 200, 2000, 2**63


@dataclass(frozen=True)
class Figure:
    """One metric of one task."""

    task: str
    """Name of the task or of the group of tasks."""
    metric: str
    """Metric as lm-eval names it, such as `acc`; with a filter, such as `exact_match,strict`."""
    value: float | None
    """None if the value is not finite."""
    stderr: float | None
    """Standard error of `value`. None if it is not known."""
    samples: int | None
    """Examples of the task that were evaluated. None if the number is not known."""

    @property
    def name(self) -> str:
        """Task and metric as one text, `TASK/METRIC`."""
        return f"{self.task}/{self.metric}"

    @property
    def text(self) -> str:
        """The value, with its standard error if it is known."""
        if self.value is None:
            return "not finite"
        shown = f"{self.value:.4f}" if abs(self.value) < 1e6 else f"{self.value:.4g}"
        return shown if self.stderr is None else f"{shown} ± {self.stderr:.4f}"


def figures_of(results: Mapping[str, Any]) -> list[Figure]:
    """Return the figures in lm-eval's results, in their order.

    Members of a group that has figures of its own are left out.
    """
    rows: Mapping[str, Mapping[str, Any]] = results.get("results", {})
    members: Mapping[str, Sequence[str]] = results.get("group_subtasks", {})
    inside: set[str] = set()
    for group, names in members.items():
        if _metrics(rows.get(group, {})):
            inside |= _below(names, members)
    found = []
    for task, row in rows.items():
        counts = results.get("n-samples", {}).get(task, {})
        samples = _count(counts.get("effective", row.get("sample_len")))
        for key in [] if task in inside else _metrics(row):
            metric, _, kind = key.partition(",")
            name = metric if kind in ("", "none") else key
            error = _finite(row.get(f"{metric}_stderr,{kind}"))
            found.append(Figure(task, name, _finite(row[key]), error, samples))
    return found


def _metrics(row: Mapping[str, Any]) -> list[str]:
    """Return the keys of the metrics in a row of lm-eval's results."""
    return [
        key
        for key, value in row.items()
        if "," in key and "_stderr," not in key and _is_number(value)
    ]


def _below(names: Iterable[str], members: Mapping[str, Sequence[str]]) -> set[str]:
    """Return `names` and the members of every group among them, at all depths."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left.extend(members.get(name, ()))
    return found


def as_report(figures: Iterable[Figure]) -> dict[str, Any]:
    """Return the fields of a report with these figures."""
    figures = list(figures)
    return {
        "results": {each.name: each.value for each in figures},
        "stderr": {each.name: each.stderr for each in figures if each.stderr is not None},
        "samples": {each.task: each.samples for each in figures if each.samples is not None},
    }


def checked_figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return results, standard errors and numbers of samples of a report, as far as valid.

    Raises `ValueError` if the report has no results.
    """
    found = {}
    for key in ("results", "stderr", "samples"):
        own = metrics.get(key)
        if not isinstance(own, dict) or len(own) > _MOST:
            raise ValueError(f"{key} is missing, or is not what a report on tasks has there")
        found[key] = {
            plain(str(name))[:_LONGEST]: _finite(value)
            for name, value in own.items()
            if value is None or (_is_number(value) and not abs(value) >= _LARGEST)
        }
    if not found["results"]:
        raise ValueError("results are missing")
    return found


def reported(metrics: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a report, or of its line in `metrics.jsonl`."""
    results, errors, samples = (
        own if isinstance(own := metrics.get(key), dict) else {}
        for key in ("results", "stderr", "samples")
    )
    found = []
    for name, value in results.items():
        task, _, metric = str(name).rpartition("/")
        if task and (value is None or _is_number(value)):
            count = _count(samples.get(task))
            found.append(Figure(task, metric, _finite(value), _finite(errors.get(name)), count))
    return found


def line(figures: Sequence[Figure], after_round: int | None = None) -> str:
    """Return the figures as one line for people.

    `after_round`: round of the evaluated anchor; -1 means before training. None: not said.
    """
    shown = ", ".join(f"{each.task} {each.metric} {each.text}" for each in figures[:SHOWN])
    more = f" and {len(figures) - SHOWN} more figures" if len(figures) > SHOWN else ""
    when = "" if after_round is None else f" {moment(after_round)}"
    return plain(f"tasks{when}: {shown}{more}")


def moment(after_round: int) -> str:
    """Return when the anchor after `after_round` was there, in words."""
    return "before training" if after_round < 0 else f"after round {after_round}"


def comparison(columns: Mapping[str, Sequence[Figure]]) -> list[list[str]]:
    """Return a table with a row for each task and metric, and a column for each model.

    `columns`: figures by the model's name. The first row has the titles.
    """
    names = list(dict.fromkeys(each.name for own in columns.values() for each in own))
    known = {model: {each.name: each for each in own} for model, own in columns.items()}
    table = [["task", "metric", "examples", *columns]]
    for name in names:
        there = [own[name] for own in known.values() if name in own]
        counts = list(dict.fromkeys("-" if f.samples is None else f"{f.samples:,}" for f in there))
        cells = [own[name].text if name in own else "-" for own in known.values()]
        table.append([there[0].task, there[0].metric, ", ".join(counts), *cells])
    return table


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None."""
    try:
        return float(value) if _is_number(value) and math.isfinite(value) else None
    except OverflowError:
        return None


def _count(value: Any) -> int | None:
    return int(value) if _is_number(value) and math.isfinite(value) and value >= 0 else None
