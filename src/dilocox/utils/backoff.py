"""Delays between retries: exponential backoff with jitter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_DRAW = random.SystemRandom()
"""Not the generator of `random`, from which a user's own loop may draw its data."""


def backoff_delays(
    first: float, most: float, uniform: Callable[[float, float], float] = _DRAW.uniform
) -> Iterator[float]:
    """Yields the delay before each retry, in seconds, without end.

    The upper bound of a delay doubles from `first` up to `most`. Each delay is random, from half of
    its bound to the bound. The randomness keeps clients that failed together from retrying together
    ("equal jitter"; M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015).

    Args:
        first: bound of the first delay, in seconds.
        most: largest bound, in seconds.
        uniform: returns a random number between its two arguments.
    """
    pause = first
    while True:
        yield pause * uniform(0.5, 1.0)
        pause = min(2 * pause, most)
