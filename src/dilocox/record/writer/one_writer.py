"""Lock that lets only one process write a run's log.

The writer is the coordinator, or a command that hands in an audit verdict while no coordinator
runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "record.lock"
"""Name of the lock file in the coordinator's folder."""
_LOOK = 0.05
"""Seconds between two attempts to take the lock."""


@contextlib.contextmanager
def held(folder: Path, patience: float = 0.0, name: str = LOCK) -> Iterator[bool]:
    """Hold the lock of the log within the context; yields False if another process holds it.

    Args:
        folder: The coordinator's own folder; created if missing.
        patience: Seconds to wait for the other process.
        name: File name of the lock in the folder.

    Raises:
        OSError: The lock file cannot be opened.
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
            # Unlock explicitly: a process forked in the meantime has the descriptor, too.
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
