"""The controller's choice for a round, and how it is shortened to the steps that are left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dilocox.config.run_config import RunConfig


@dataclass(frozen=True)
class Choice:
    """Settings of a round's plan that may change from round to round."""

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
    """Why these settings were chosen, in one line with numbers and units."""
    cut: bool = False
    """True if the round was shortened, because fewer steps are left than were chosen."""

    def shortened(self, left: int, overlap: str) -> Choice:
        """Return this choice for a round of at most `left` inner steps.

        Slots keep their length if `left` is a multiple of it. Otherwise each slot becomes one inner
        step; a round of one slot keeps one slot. The delay keeps its time, at most the whole round.
        With the `overlap` rules naive and eager it is the whole round.
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
    """Return the settings of the run file, which are also the starting point of adapted plans."""
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
