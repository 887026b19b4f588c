"""Figures beside the held-out loss in reports and metrics, and as text for people. Pure functions.

They are the loss by source, and the figures of held-out pairs in preference training.

A report is untrusted input for its readers: a value of the wrong type is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dilocox.config.preference import ACCURACY, MARGIN
from dilocox.utils.plain_text import plain

BY_SOURCE = "val_loss_by_source"
"""Field of a report of the held-out loss: the loss of each of several sources, by name."""
SHOWN = 6
"""Most sources in one line for people."""
LEAST_MARGIN = 5e-5
"""Smallest mean margin that is not shown as 0.0000."""


def losses_by_source(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the held-out loss of each source in a report or record; empty without any."""
    own = record.get(BY_SOURCE)
    if not isinstance(own, dict):
        return {}
    found = {str(name): _finite(loss) for name, loss in own.items()}
    return {name: loss for name, loss in found.items() if loss is not None}


def pair_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of held-out pairs in a report or record, by field; empty without any."""
    found = {name: _finite(record.get(name)) for name in (ACCURACY, MARGIN)}
    return {name: value for name, value in found.items() if value is not None}


def beside_loss(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures beside the held-out loss in a report or record, by field."""
    own = losses_by_source(record)
    return {**({BY_SOURCE: own} if own else {}), **pair_figures(record)}


def beside_text(record: Mapping[str, Any]) -> str:
    """Return the figures beside the held-out loss, as text that follows the loss in a line."""
    pairs = pair_text(pair_figures(record))
    return source_text(losses_by_source(record)) + (f"; {pairs}" if pairs else "")


def pair_text(figures: Mapping[str, float]) -> str:
    """Return the figures of held-out pairs as text; an empty text without any.

    The share that is ranked right is left out beside a mean margin of 0, as before training: then
    margins are rounding errors, and a share of 100 % would be as likely as one of 0 %.
    """
    found = []
    if ACCURACY in figures and abs(figures.get(MARGIN, 1.0)) >= LEAST_MARGIN:
        found.append(f"{figures[ACCURACY]:.1%} of pairs ranked right")
    if MARGIN in figures:
        found.append(f"mean margin {figures[MARGIN]:.4f}")
    return ", ".join(found)


def source_text(losses: Mapping[str, float]) -> str:
    """Return losses by source in brackets, behind a space; an empty text without any."""
    if not losses:
        return ""
    shown = ", ".join(f"{name} {loss:.4f}" for name, loss in list(losses.items())[:SHOWN])
    more = ", …" if len(losses) > SHOWN else ""
    return f" ({plain(shown)}{more})"


def changes(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the first and the last figures beside the held-out loss in a summary, as text by name.

    The names are those of sources, and `pairs`.
    """
    first, last = (
        losses_by_source({BY_SOURCE: summary.get(f"{BY_SOURCE}_{end}")})
        for end in ("first", "last")
    )
    found = {
        plain(name): f"{first[name]:.4f} before, {loss:.4f} after"
        for name, loss in last.items()
        if name in first
    }
    before, after = (
        pair_figures({name: summary.get(f"{name}_{end}") for name in (ACCURACY, MARGIN)})
        for end in ("first", "last")
    )
    if before and after:
        found["pairs"] = f"{pair_text(before)} before; {pair_text(after)} after"
    return found


def _finite(value: object) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)
