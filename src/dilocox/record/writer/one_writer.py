"""One process at a time writes the log of a run: its coordinator, or who hands in a verdict."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "record.lock"
"""In the coordinator's folder."""
_LOOK = 0.05
"""Seconds between two looks."""


@contextlib.contextmanager
def held(folder: Path, patience: float = 0.0, name: str = LOCK) -> Iterator[bool]:
    """Keep other processes from writing the log meanwhile; false where one writes it.

    `folder`: the coordinator's own, which is made. `patience`: seconds in which the other one may
    end. `name`: another lock of the folder. Raises `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience
    lock = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    own = False
    try:
        while not (own := _lock(lock)) and time.monotonic() < end:
            time.sleep(_LOOK)
        yield own
    finally:
        if own:
            # A process that was forked meanwhile has the descriptor, too.
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
