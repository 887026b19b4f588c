"""A clock for code that takes its clock and its sleep as arguments."""

from __future__ import annotations


class ManualClock:
    """A clock that only `sleep` and its owner move."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
