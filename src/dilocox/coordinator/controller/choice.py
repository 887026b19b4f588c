"""What is chosen for a round, and what of it fits into the steps that are left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dilocox.config.run_config import RunConfig


@dataclass(frozen=True)
class Choice:
    """The part of a round's plan that may change from round to round."""

    inner_steps: int
    slots: int
    fragments: int
    delay: int
    codec: str
    learning_rate: float
    momentum: float
    residual_decay: float
    residual_view: float
    keep: float
    reason: str
    """One line with numbers and units."""
    cut: bool = False
    """It has fewer steps than were chosen: no more are left."""

    def shortened(self, left: int, overlap: str) -> Choice:
        """This choice for a round of at most `left` inner steps.

        Slots keep their length if whole ones fit, else they become one inner step each (a round
        of one slot stays one). The delay stays the same time, at most the round.
        """
        if left >= self.inner_steps or left <= 0:
            return self
        length = self.inner_steps // self.slots
        slots, delay = left // length, self.delay
        if self.slots == 1:
            slots = 1
        elif left % length:
            slots, delay = left, self.delay * length
        delay = slots if overlap in ("naive", "eager") else min(delay, slots)
        reason = f"{self.reason}; cut to the {left} inner steps that are left"
        return replace(self, inner_steps=left, slots=slots, delay=delay, reason=reason, cut=True)


def as_the_run_file_says(config: RunConfig, reason: str = "as the run file says") -> Choice:
    """The fixed plan, and where an adapted one begins."""
    outer, compression = config.outer, config.compression
    return Choice(
        inner_steps=outer.inner_steps,
        slots=outer.slots,
        fragments=outer.fragments,
        delay=outer.delay,
        codec=compression.codec,
        learning_rate=outer.learning_rate,
        momentum=outer.momentum,
        residual_decay=compression.residual_decay,
        residual_view=compression.residual_view,
        keep=outer.keep,
        reason=reason,
    )
