"""Hard CPU quotas by control groups, of version 1 (`cpu` controller) and version 2.

A group may run so many seconds of processor time in every period of `PERIOD_US`, whether the
machine has nothing else to do or not. It gets them before anything else on the machine: groups of
the lab weigh `WEIGHT` times what others do, so that a quota is what a site has and not only what it
may have. Groups lie below the root of the hierarchy, so that no other limit applies to them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dilocox.tools.testbed.addressing import owner_of
from dilocox.tools.testbed.commands import PREFIX, LabError

PERIOD_US = 20_000
"""Short, since a group that has used up its time answers nobody until the period ends; the kernel
loses track of the share in much shorter ones on a busy machine (a busy loop with 0.9 of a core
beside five others got 0.65 in periods of 10 ms, 0.85 in these, 0.88 in ones of 100 ms)."""
WEIGHT = 100
"""Times what the kernel gives a group that nothing is said about: the most that version 2 allows.
Without it two sites with 0.9 of a core each got 0.1 beside ten other processes, with it 0.9."""
LEAST = 0.05
"""Cores. The kernel takes no quota below 1 ms a period."""


@dataclass(frozen=True)
class Hierarchy:
    """Where groups with CPU quotas can be made."""

    root: Path
    version: int


def find(mounts: Path = Path("/proc/self/mounts")) -> Hierarchy | None:
    """The hierarchy that has the `cpu` controller, by the table of mounts, or none."""
    if not mounts.exists():
        return None
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, place, kind, options, *_ = line.split()
        root = Path(place)
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(root, 1)
        if kind == "cgroup2":
            known = root / "cgroup.controllers"
            if known.exists() and "cpu" in known.read_text(encoding="utf-8").split():
                return Hierarchy(root, 2)
    return None


def unsupported_reason(hierarchy: Hierarchy | None) -> str | None:
    """Why no quota can be given here, in one line; none if it can."""
    if hierarchy is None:
        return "CPU quotas need the cpu controller of control groups, which is not mounted here"
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        make(hierarchy, name, LEAST)
    except LabError as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            (hierarchy.root / name).rmdir()
    return None


def make(hierarchy: Hierarchy, name: str, cores: float | None) -> Path:
    """A group with a quota of `cores` CPU cores, or with none. Raises `LabError`."""
    group = hierarchy.root / name
    quota = None if cores is None else round(cores * PERIOD_US)
    try:
        if hierarchy.version == 1:
            group.mkdir()
            _write(group / "cpu.shares", str(1024 * WEIGHT))
            if quota is not None:
                _write(group / "cpu.cfs_period_us", str(PERIOD_US))
                _write(group / "cpu.cfs_quota_us", str(quota))
        else:
            control = hierarchy.root / "cgroup.subtree_control"
            if "cpu" not in control.read_text(encoding="utf-8").split():
                _write(control, "+cpu")
            group.mkdir()
            _write(group / "cpu.weight", str(100 * WEIGHT))
            if quota is not None:
                _write(group / "cpu.max", f"{quota} {PERIOD_US}")
    except OSError as error:
        raise LabError(
            f"{error.filename or group}: a CPU quota cannot be set ({error.strerror}); control "
            "groups must be writable, as they are for root outside of containers"
        ) from None
    return group


def entered(group: Path, arguments: list[str]) -> list[str]:
    """A command line that enters `group` and then runs `arguments`."""
    return ["sh", "-c", 'echo 0 >"$0" && exec "$@"', str(group / "cgroup.procs"), *arguments]


def enter(group: Path) -> None:
    """Move this process to `group`, with all it starts from now on. Raises `LabError`."""
    try:
        _write(group / "cgroup.procs", "0")
    except OSError as error:
        raise LabError(f"{group}: cannot be entered ({error.strerror})") from None


def members(group: Path) -> Iterator[int]:
    """Processes in `group`; none if it is not there."""
    with contextlib.suppress(OSError):
        yield from map(int, (group / "cgroup.procs").read_text(encoding="utf-8").split())


def all_groups() -> list[Path]:
    """Groups that any lab has made, by their names."""
    hierarchy = find()
    if hierarchy is None:
        return []
    return sorted(
        e for e in hierarchy.root.iterdir() if owner_of(e.name) is not None and e.is_dir()
    )


def _write(file: Path, text: str) -> None:
    """One write, as the kernel wants it; errors name the file."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(handle, text.encode())
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        os.close(handle)
