"""Keeps uploads below a rate, so that training beside them has the rest of the uplink."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Uplink:
    """A budget of bytes per second, shared by all threads that upload."""

    def __init__(
        self,
        rate: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`rate`: bytes per second; None: no limit. `clock` and `sleep`: in seconds."""
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free = clock()
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Block until `size` bytes may be sent.

        The bytes sent up to any moment are at most `rate` times the time, and `size` bytes of one
        call. Time in which nothing was sent is not saved up.
        """
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free)
            self._free = begin + size / self._rate
        if begin > now:
            self._sleep(begin - now)

    def seconds(self, size: int) -> float:
        """Return the seconds that `size` bytes take at the rate; 0 without a rate."""
        return 0.0 if self._rate is None else size / self._rate
