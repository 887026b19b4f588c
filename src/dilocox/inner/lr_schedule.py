"""Learning rate of every inner step, as a pure function."""

from __future__ import annotations

import math

from dilocox.config.site import InnerSection


def learning_rate(step: int, total_steps: int, inner: InnerSection) -> float:
    """Learning rate of inner step `step` (counted from 0) of a run of `total_steps`.

    The rate climbs linearly to the peak over `inner.warmup_steps`. Then `cosine` falls along half
    a cosine, `wsd` stays until the last `inner.decay_steps` (0: a fifth of the run) and falls
    linearly, `constant` stays. The last step of `cosine` and `wsd` has `final_fraction` of the
    peak; later steps, if any, keep it.
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
    # A warm-up longer than the run, or one that meets the decay: the lower of the two counts.
    return inner.learning_rate * min(
        climb, inner.final_fraction + (1 - inner.final_fraction) * fall
    )


def _progress(done: int, steps: int) -> float:
    if steps <= 0:
        return 1.0 if done >= 0 else 0.0
    return min(1.0, max(0.0, done / steps))
