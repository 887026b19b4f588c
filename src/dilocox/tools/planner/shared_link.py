"""Simulated link whose rate is shared evenly by all transfers in flight."""

from __future__ import annotations

from collections.abc import Callable


class SharedLink:
    """Carries transfers at a total of `rate` bytes per second.

    Every transfer in flight gets an equal share, as TCP connections roughly do. `at(when, act)`
    schedules an event of the caller's simulation; times are seconds on the caller's clock.
    """

    def __init__(self, rate: float, at: Callable[[float, Callable[[], None]], None]) -> None:
        self.rate = rate
        self._at = at
        self._left: dict[int, tuple[float, Callable[[], None]]] = {}
        """By transfer: value of `_served` at which the transfer ends, and the callback."""
        self._served = 0.0
        """Bytes that a transfer in flight since the beginning would have received."""
        self._last = 0.0
        self._count = 0
        self._planned = 0

    def add(self, size: float, now: float, ended: Callable[[], None]) -> None:
        """Begin a transfer of `size` bytes; `ended` is called when it has finished."""
        self._serve(now)
        self._count += 1
        self._left[self._count] = (self._served + size, ended)
        self._plan(now)

    def _serve(self, now: float) -> None:
        if self._left:
            self._served += (now - self._last) * self.rate / len(self._left)
        self._last = now

    def _plan(self, now: float) -> None:
        """Schedule the end of the transfer that ends next; events scheduled before are void."""
        if not self._left:
            return
        self._planned += 1
        number = self._planned
        first = min(self._left, key=lambda key: self._left[key][0])
        due = max(0.0, self._left[first][0] - self._served) * len(self._left) / self.rate

        def end() -> None:
            if number != self._planned:
                return
            self._serve(now + due)
            target, ended = self._left.pop(first)
            self._served = max(self._served, target)
            self._plan(now + due)
            ended()

        self._at(now + due, end)
