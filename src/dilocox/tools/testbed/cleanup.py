"""Removes what a lab has made: processes, network namespaces, control groups, registry entry."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from dilocox.tools.testbed import cgroups, registry
from dilocox.tools.testbed.addressing import owner_of
from dilocox.tools.testbed.commands import LabError, ip

_NAMESPACES = Path("/run/netns")
_PATIENCE = 5.0
"""Seconds to wait for killed processes to end."""


def remove_namespace(name: str) -> None:
    """Kill all processes in a network namespace, except this one, and remove it if it exists."""
    if not (_NAMESPACES / name).exists():
        return
    deadline = time.monotonic() + _PATIENCE
    while _kill(_inside(name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(LabError):
        ip("netns", "del", name)


def remove_group(group: Path) -> None:
    """Kill all processes in a control group, except this one, and remove it if it exists."""
    deadline = time.monotonic() + _PATIENCE
    while group.exists() and time.monotonic() < deadline:
        # A process that is just being started may still enter the group, which cannot be removed
        # then.
        _kill(cgroups.members(group))
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)


def remove_of(owner: int) -> list[str]:
    """Remove everything that process `owner` has made, and return the names of what was removed."""
    groups = [group for group in cgroups.all_groups() if owner_of(group.name) == owner]
    names = [name for name in _namespaces() if owner_of(name) == owner]
    # Control groups first, because their processes may start others.
    for group in groups:
        remove_group(group)
    for name in names:
        remove_namespace(name)
    registry.forget(owner)
    return [*names, *(str(group) for group in groups)]


def remove_left_over() -> list[str]:
    """Remove what ended processes have left behind, and return the names of what was removed."""
    found = [*_namespaces(), *(group.name for group in cgroups.all_groups())]
    owners = {owner for owner in map(owner_of, found) if owner is not None}
    owners |= set(registry.owners())
    gone = sorted(owner for owner in owners if not registry.is_alive(owner))
    return [name for owner in gone for name in remove_of(owner)]


def _namespaces() -> list[str]:
    if not _NAMESPACES.exists():
        return []
    return sorted(e.name for e in _NAMESPACES.iterdir() if owner_of(e.name) is not None)


def _kill(processes: Iterator[int]) -> bool:
    """Kill all of `processes` except this one, and return whether there were any."""
    left = [number for number in processes if number != os.getpid()]
    for number in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return bool(left)


def _inside(name: str) -> Iterator[int]:
    with contextlib.suppress(LabError):
        yield from map(int, ip("netns", "pids", name).split())
