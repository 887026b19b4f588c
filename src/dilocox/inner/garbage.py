"""Python's garbage collector, run at the same steps by all ranks instead of whenever it likes.

A collection stops its rank for up to tenths of a second. All ranks that wait for this rank in a
collective operation stop, too. torchtitan collects by steps as well (its `GarbageCollection`).
"""

from __future__ import annotations

import gc

EVERY = 50
"""Steps between two collections of young objects."""
FULL = 20
"""Every so many collections one looks at all objects that were made since training began. An object
that survives a collection of young objects is old, and only this larger collection frees it."""


class PythonCollects:
    """Python's collector runs whenever it likes: nothing is done here."""

    def step(self) -> None:
        """A step was trained."""

    def rest(self) -> None:
        """Nothing is trained for a while."""


class Collector(PythonCollects):
    """Collects garbage of this process by training steps."""

    def __init__(self, every: int = EVERY, full: int = FULL) -> None:
        self._every = every
        self._full = full
        self._steps = 0
        self._frozen = False
        self._active = False

    def step(self) -> None:
        """Collect garbage if this step is due, without a look at objects from before training."""
        if not self._active:
            if not self._frozen:
                gc.collect()
                # What was built lives as long as the process; no collection need look at it.
                gc.freeze()
                self._frozen = True
            gc.disable()
            self._active = True
        self._steps += 1
        if self._steps % (self._every * self._full) == 0:
            gc.collect()
        elif self._steps % self._every == 0:
            gc.collect(1)

    def rest(self) -> None:
        """Python collects by itself until the next step."""
        if self._active:
            gc.enable()
            self._active = False
