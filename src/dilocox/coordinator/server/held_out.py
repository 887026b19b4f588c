"""Held-out losses that one site has reported."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class HeldOut:
    """Lowest held-out loss that a site has reported, and the evaluations since then."""

    best: float | None = None
    """Lowest loss. None: no finite loss was reported yet."""
    stale: int = 0
    """Number of evaluations since the lowest loss."""
    asks: bool = False
    """True if the site's callback asks to end the run."""
    round: int = -1
    """Round of the newest evaluation; -1: there is none."""

    def take(self, round_: int, loss: object) -> None:
        """Count the evaluation after round `round_`, unless this round has counted.

        A resumed run may repeat a round whose evaluation was reported before its checkpoint was
        complete. A loss that is not a finite float is no improvement.
        """
        if round_ <= self.round:
            return
        self.round = round_
        value = loss if isinstance(loss, float) else math.nan
        if math.isfinite(value) and (self.best is None or value < self.best):
            self.best, self.stale = value, 0
        elif self.best is not None:
            self.stale += 1
