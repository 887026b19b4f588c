"""How long to wait before the next try."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator


def backoff_delays(
    first: float, most: float, uniform: Callable[[float, float], float] = random.uniform
) -> Iterator[float]:
    """Seconds before each further try: doubling from `first` up to `most`, each less up to a half.

    The random part keeps those that failed together from coming back together ("equal jitter";
    M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015).
    """
    pause = first
    while True:
        yield pause * uniform(0.5, 1.0)
        pause = min(2 * pause, most)
