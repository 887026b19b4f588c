"""Inner learning rates of the evidence benchmark: one rule for every method (PROTOCOL.md).

- `full`: trials of a seed that no quoted row has, at half, one and two times the start. While the
  best rate is at an end of the tried ones, the next rate beyond that end is tried.
- `down`: whole runs of the first quoted seed, at one and half of the start. While halving lowers
  the loss, it goes on. The best trial is the row.
- `same`: the start, without trials.
- `frozen`: the rates of results/quality-tuning.json, found on another text. Synchronous training
  alone is also tried at half and at two times its rate, and the best of the three counts.

The start is the best rate of the same method in the cell that `starts_at` names, else `START`.
Outer rates are those of results/quality-tuning.json in every cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.evidence.cells import BASELINE, Cell

START = 3e-3
TRIAL_SEED = 1000
LIMITS = (3e-4, 5e-2)
"""Lowest and highest rate that is tried."""

Losses = Mapping[float, float]
"""Held-out loss by inner rate; infinite if training diverged."""


def rounded(rate: float) -> float:
    """Return a rate with two digits."""
    return float(f"{rate:.2g}")


def trial_seed(cell: Cell, seeds: tuple[int, ...]) -> int:
    """Return the seed of the cell's trials."""
    return TRIAL_SEED if cell.rule == "full" else seeds[0]


def next_trial(cell: Cell, label: str, start: float, done: Losses) -> float | None:
    """Return the rate to try next. None if the cell's rule asks for no other trial."""
    start = rounded(start)
    if cell.rule == "same" or (cell.rule == "frozen" and label != BASELINE):
        return None
    half, double = rounded(start / 2), rounded(start * 2)
    asked = (start, half) if cell.rule == "down" else (start, half, double)
    for rate in asked:
        if rate not in done:
            return rate
    best = min(done, key=lambda rate: done[rate])
    if math.isinf(done[best]) or cell.rule == "frozen":
        return None
    beyond = []
    if best == min(done):
        beyond.append(rounded(best / 2))
    if best == max(done) and cell.rule == "full":
        beyond.append(rounded(best * 2))
    return next((rate for rate in beyond if LIMITS[0] <= rate <= LIMITS[1]), None)


def best_rate(start: float, done: Losses) -> float:
    """Return the rate with the lowest loss; the start without trials."""
    return min(done, key=lambda rate: done[rate]) if done else rounded(start)
