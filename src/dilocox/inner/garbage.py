"""Python's garbage collector, run by all ranks at the same steps instead of at any time.

A collection stops its rank for up to tenths of a second. All ranks that wait for this rank in a
collective operation stop, too. torchtitan collects by steps as well (its `GarbageCollection`).
"""

from __future__ import annotations

import gc

EVERY = 50
"""Steps between two collections of young objects."""
FULL = 20
"""Every `FULL`th collection is a full one: it examines all objects made since training began. An
object that survives a collection of young objects is old, and only a full collection frees it."""


class PythonCollects:
    """Leaves collections to Python. The methods do nothing."""

    def step(self) -> None:
        """Call this after every training step."""

    def rest(self) -> None:
        """Call this when training pauses."""


class Collector(PythonCollects):
    """Collects garbage of this process by training steps."""

    def __init__(self, every: int = EVERY, full: int = FULL) -> None:
        self._every = every
        self._full = full
        self._steps = 0
        self._frozen = False
        self._active = False

    def step(self) -> None:
        """Collect garbage if it is due at this step. Objects from before training are skipped."""
        if not self._active:
            if not self._frozen:
                gc.collect()
                # Objects from before training live as long as the process: collections skip them.
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
        """Let Python collect by itself until the next step."""
        if self._active:
            gc.enable()
            self._active = False
