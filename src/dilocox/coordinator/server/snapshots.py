"""The state of a run as a text, so that a restart need not replay the whole event log.

A snapshot holds what the events up to a number add up to. It is a shortcut and nothing else: one
that is damaged, or that other code has made, is passed over, and the events are replayed.
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
"""From one snapshot to the next: replaying so many takes about a second."""
KEPT = 8
"""Snapshots that stay: an older one serves to go back to a checkpoint."""


@functools.cache
def code() -> str:
    """SHA-256, hex, of the code that makes states of events: another one may make other states."""
    total = hashlib.sha256()
    server, coordinator = Path(__file__).parent, Path(__file__).parents[1]
    rules = [*(coordinator / "protocol").glob("*.py"), coordinator / "controller" / "pace.py"]
    for path in sorted([*server.glob("*.py"), *rules]):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def packed(state: CoordinatorState) -> bytes:
    """`state` without its run file, compressed."""
    fields = {name: encode(kind, getattr(state, name)) for name, kind in _fields()}
    return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)


def unpacked(config: RunConfig, data: bytes) -> CoordinatorState:
    """Inverse of `packed`. Raises ValueError, KeyError or TypeError for anything else."""
    try:
        found = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    fields = {name: decode(kind, found[name]) for name, kind in _fields()}
    return CoordinatorState(config, **fields)


def _fields() -> list[tuple[str, Any]]:
    return [each for each in fields_of(CoordinatorState) if each[0] != "config"]
