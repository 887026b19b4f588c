"""Tells people once if rounds wait although the run file declares link and step time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dilocox.config.outer import ControlSection
from dilocox.coordinator.controller.link_estimator import declared

ROUNDS = 8
"""Rounds in a row that must wait. A start or one fault of the network is shorter."""
NOTABLE = 0.25
"""Share of a round for which every site waits, from which on it counts."""


class DeclaredLink:
    """Compares rounds with the promise of `control.link` and `control.step_seconds`.

    With both keys dilocox measures neither, so a wrong value costs time in every round.
    """

    def __init__(self, control: ControlSection) -> None:
        """`control`: the run file's section. Without both keys, or with `control.adapt` at another
        value than `link`, no plan follows from them, and there is never a line."""
        follows = control.adapt == "link" and declared(control) is not None
        self._waits: list[float] | None = [] if follows else None

    def line(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """Return a line for people, once; None if there is nothing to tell.

        `rows`: the reports of all sites about a round. The site that waits least counts, because a
        slow site lets all others wait on the fastest link, too.
        """
        if self._waits is None:
            return None
        least = min(float(row["wait_share"]) for row in rows)
        self._waits = [*self._waits, least] if least > NOTABLE else []
        if len(self._waits) < ROUNDS:
            return None
        share = sum(self._waits) / len(self._waits)
        self._waits = None
        return (
            f"all sites waited {share:.0%} of the last {ROUNDS} rounds, though the run file "
            "declares control.link and control.step_seconds: if the plan promised less, the link "
            "is slower than declared, or other messages fill it; without the two keys dilocox "
            "measures both"
        )
