"""What one site has reported of the held-out loss."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class HeldOut:
    """The lowest held-out loss that a site has reported, and what came after it."""

    best: float | None = None
    stale: int = 0
    """Evaluations since the lowest loss."""
    asks: bool = False
    """Its callback wants the run to end."""

    def take(self, loss: object) -> None:
        """Take up the next evaluation. What is no finite number is no improvement."""
        value = loss if isinstance(loss, float) else math.nan
        if math.isfinite(value) and (self.best is None or value < self.best):
            self.best, self.stale = value, 0
        elif self.best is not None:
            self.stale += 1
