"""Learning rates of the quality benchmark: the same trials for every method.

Trials for short runs take half the steps of the paper's regime, with D=4, non-IID, and a seed that
no quoted row has. Each method has six trials. The first four are at the same four inner learning
rates for every method. A method with an outer optimizer has the published outer learning rate and
momentum in them, and two other pairs at the best of the four rates. A method without an outer
optimizer, and dilocox, which chooses its outer rates itself, has two more inner rates near the
best. Methods that differ only in a dense codec (diloco, opendiloco, intellect1) share trials.

In long runs the inner rate starts at that of short runs, and is doubled as long as the loss falls.
If doubling does not help, it is halved as long as the loss falls. Outer rates are those of short
runs. Every method has at least two trials besides its own rate, by the same rule. Trials are whole
runs of the first quoted seed, since each takes a quarter of an hour; the best one is the row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.quality.rows import LEAD, OUTER_PUBLISHED, Entry, Settings

TRIALS = 6
TRIAL_STEPS = 320
SEED = 1000
INNER_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
OUTER_PAIRS = ((0.8, 0.5), (1.5, 0.5))
UNTUNED_RATE = 6e-3
LONG_SEED = 0


@dataclass(frozen=True)
class Rates:
    """Inner learning rate, and outer learning rate and momentum if they are set."""

    inner: float
    outer: tuple[float, float] | None = None

    @property
    def settings(self) -> Settings:
        """The rates as keys of the run file."""
        keys = {"inner.learning_rate": self.inner}
        if self.outer is not None:
            keys |= {"outer.learning_rate": self.outer[0], "outer.momentum": self.outer[1]}
        return keys


ROW = ("val_loss", "label", "reduction_total", "seconds", "regime", "steps", "seed", "text")
"""Fields of a row that a trial keeps."""
Losses = Mapping[Rates, float]
"""Held-out loss by rates; infinite if training failed."""
Trials = Mapping[str, Losses]
"""Losses by `tuned_as` of the entries."""


def published_rates(tuned_as: str, inner: float) -> Rates:
    """Return an inner learning rate with the published outer rates, if there are any."""
    return Rates(inner, OUTER_PUBLISHED.get(tuned_as))


def open_trials(tuned_as: str, done: Losses) -> list[Rates]:
    """Return the trials to make next, without those in `done`. Empty if all trials are made."""
    outer = OUTER_PUBLISHED.get(tuned_as)
    first = [Rates(inner, outer) for inner in INNER_RATES]
    missing = [trial for trial in first if trial not in done]
    if missing:
        return missing
    best = min(first, key=lambda trial: done[trial]).inner
    if outer is None:
        second = [Rates(_round(best * factor)) for factor in (math.sqrt(0.5), math.sqrt(2.0))]
    else:
        second = [Rates(best, pair) for pair in OUTER_PAIRS]
    return [trial for trial in second if trial not in done]


def open_long_trials(start: Rates, done: Losses) -> list[Rates]:
    """Return the trials to make next in long runs; empty if all are made.

    `start` has the rates of short runs. Inner rates are doubled, or else halved, while the loss
    falls.
    """
    if start not in done:
        return [start]
    for factor in (2.0, 0.5):
        tried, best = replace(start, inner=_round(factor * start.inner)), done[start]
        while tried in done and done[tried] < best:
            best = done[tried]
            tried = replace(tried, inner=_round(factor * tried.inner))
        if tried not in done:
            return [tried]
        if best < done[start]:
            return []
    return []


def _round(rate: float) -> float:
    return float(f"{rate:.2g}")


def chosen(entry: Entry, done: Losses, longer: Losses | None = None) -> Rates:
    """Return the learning rates of `entry` from the trials of its `tuned_as`, or the untuned rate.

    `longer` has the trials in long runs, for a long run. They change the inner rate only.
    """
    rates = _of_short_runs(entry, done)
    alike = {trial: loss for trial, loss in (longer or {}).items() if trial.outer == rates.outer}
    return min(alike, key=lambda trial: alike[trial]) if alike else rates


def _of_short_runs(entry: Entry, done: Losses) -> Rates:
    if not done:
        return Rates(UNTUNED_RATE)
    allowed = done
    if entry.rates == "inner":
        outer = OUTER_PUBLISHED.get(entry.tuned_as)
        allowed = {trial: loss for trial, loss in done.items() if trial.outer == outer}
    return min(allowed, key=lambda trial: allowed[trial])


def read(path: Path, regime: str = LEAD[0]) -> dict[str, dict[Rates, float]]:
    """Return the trials of a results file, by `tuned_as`. Empty if the file does not exist."""
    if not path.exists():
        return {}
    return from_rows(json.loads(path.read_text(encoding="utf-8"))["rows"], regime)


def from_rows(
    rows: Iterable[Mapping[str, Any]], regime: str = LEAD[0]
) -> dict[str, dict[Rates, float]]:
    """Return the trials of a regime by `tuned_as`, from rows that `row` has made."""
    trials: dict[str, dict[Rates, float]] = {}
    for row in rows:
        if row.get("regime", LEAD[0]) != regime:
            continue
        pair = row["outer_learning_rate"], row["outer_momentum"]
        rates = Rates(row["learning_rate"], None if None in pair else pair)
        loss = row["val_loss"]
        trials.setdefault(row["tuned_as"], {})[rates] = math.inf if loss is None else loss
    return trials


def row(tuned_as: str, rates: Rates, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial as a row of the tuning file."""
    outer, momentum = rates.outer or (None, None)
    return {
        "tuned_as": tuned_as,
        "learning_rate": rates.inner,
        "outer_learning_rate": outer,
        "outer_momentum": momentum,
        **{key: measured.get(key) for key in ROW},
    }
