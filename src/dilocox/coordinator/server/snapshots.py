"""Snapshots of a run's state, so that a restart need not replay the whole event log.

A snapshot holds the state after the events up to a number. Snapshots only save time. If a snapshot
is damaged, or made by other code, the events are replayed instead.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.utils.typed_json import decode, encode, fields_of

EVENTS = 20_000
"""Number of events between two snapshots; replaying them takes about a second."""
KEPT = 8
"""Number of snapshots that are kept; older ones serve to resume from a checkpoint."""


@functools.cache
def code() -> str:
    """Return the SHA-256 (hex) of the code that applies events.

    Other code may give other states, so its snapshots are not used.
    """
    total = hashlib.sha256()
    server, coordinator = Path(__file__).parent, Path(__file__).parents[1]
    rules = [*(coordinator / "protocol").glob("*.py"), coordinator / "controller" / "pace.py"]
    for path in sorted([*server.glob("*.py"), *rules]):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def packed(state: CoordinatorState) -> bytes:
    """Return `state` without its run file as compressed JSON."""
    fields = {name: encode(kind, getattr(state, name)) for name, kind in _fields()}
    return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)


def unpacked(config: RunConfig, data: bytes) -> CoordinatorState:
    """Inverse of `packed`. Raises `ValueError`, `KeyError` or `TypeError` for other data."""
    try:
        found = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    fields = {name: decode(kind, found[name]) for name, kind in _fields()}
    return CoordinatorState(config, **fields)


def _fields() -> list[tuple[str, Any]]:
    return [each for each in fields_of(CoordinatorState) if each[0] != "config"]
