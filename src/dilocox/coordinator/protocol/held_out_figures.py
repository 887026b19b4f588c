"""The held-out loss by source in reports and metrics, and as text for people. Pure functions.

A report is untrusted input for its readers: a value of the wrong type is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dilocox.utils.plain_text import plain

BY_SOURCE = "val_loss_by_source"
"""Field of a report of the held-out loss: the loss of each of several sources, by name."""
SHOWN = 6
"""Most sources in one line for people."""


def losses_by_source(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the held-out loss of each source in a report or record; empty without any."""
    own = record.get(BY_SOURCE)
    if not isinstance(own, dict):
        return {}
    return {
        str(name): float(loss)
        for name, loss in own.items()
        if isinstance(loss, int | float) and not isinstance(loss, bool) and math.isfinite(loss)
    }


def source_text(losses: Mapping[str, float]) -> str:
    """Return losses by source in brackets, behind a space; an empty text without any."""
    if not losses:
        return ""
    shown = ", ".join(f"{name} {loss:.4f}" for name, loss in list(losses.items())[:SHOWN])
    more = ", …" if len(losses) > SHOWN else ""
    return f" ({plain(shown)}{more})"


def changes(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return, by source, the first and the last held-out loss in a run's summary, as text."""
    first, last = (
        losses_by_source({BY_SOURCE: summary.get(f"{BY_SOURCE}_{end}")})
        for end in ("first", "last")
    )
    return {
        plain(name): f"{first[name]:.4f} before, {loss:.4f} after"
        for name, loss in last.items()
        if name in first
    }
