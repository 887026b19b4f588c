"""Learning rate of every inner step, as a pure function."""

from __future__ import annotations

import math

from dilocox.config.site import InnerSection


def learning_rate(step: int, total_steps: int, inner: InnerSection) -> float:
    """Return the learning rate of inner step `step` (counted from 0) of a run of `total_steps`.

    The rate climbs linearly to the peak over `inner.warmup_steps`. Then it depends on the schedule:

    - `cosine` falls along half a cosine.
    - `wsd` stays at the peak, and falls linearly in the last `inner.decay_steps` (0 means a fifth
      of the run).
    - `constant` stays at the peak.

    In the last step, `cosine` and `wsd` reach `final_fraction` of the peak. Later steps keep it.
    """
    warmup = inner.warmup_steps
    climb = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    if inner.schedule == "constant":
        return inner.learning_rate * climb
    if inner.schedule == "cosine":
        first = min(warmup, total_steps - 1)
        progress = _progress(step - first, total_steps - 1 - first)
        fall = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        decay = min(inner.decay_steps or math.ceil(total_steps / 5), total_steps)
        fall = 1.0 - _progress(step + 1 - (total_steps - decay), decay)
    # If warm-up and decay overlap, the lower of the two rates counts.
    return inner.learning_rate * min(
        climb, inner.final_fraction + (1 - inner.final_fraction) * fall
    )


def _progress(done: int, steps: int) -> float:
    if steps <= 0:
        return 1.0 if done >= 0 else 0.0
    return min(1.0, max(0.0, done / steps))
