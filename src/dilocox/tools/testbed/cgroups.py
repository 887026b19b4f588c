"""Hard CPU quotas by control groups, version 1 (`cpu` controller) and version 2.

A group may use a fixed processor time in every period of `PERIOD_US`, even on an idle machine. The
lab's groups weigh `WEIGHT` times as much as others, so that a site really gets its quota on a busy
machine. Groups lie directly below the root of the hierarchy, so that no other limit applies.
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
"""Period of a quota in microseconds. A group that has used up its time stands still until the
period ends, so the period is short. In much shorter periods the kernel is inaccurate on a busy
machine. A busy loop with 0.9 of a core ran beside five others. It got 0.65 of a core in periods of
10 ms, 0.85 in periods of 20 ms, and 0.88 in periods of 100 ms."""
WEIGHT = 100
"""Weight as a multiple of the kernel's default: the most that version 2 allows. Beside ten other
processes, two sites with 0.9 of a core each got 0.1 without it, and 0.9 with it."""
LEAST = 0.05
"""Smallest quota in cores. The kernel accepts no quota below 1 ms per period."""


@dataclass(frozen=True)
class Hierarchy:
    """The control-group hierarchy in which groups with CPU quotas can be made."""

    root: Path
    version: int


def find(mounts: Path = Path("/proc/self/mounts")) -> Hierarchy | None:
    """Return the mounted hierarchy that has the `cpu` controller. None if there is none."""
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
    """Return in one line why CPU quotas are not possible here. None if they are."""
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
    """Make a group with a quota of `cores` CPU cores (None: no quota), and return its folder.

    Raises `LabError` if the group or its quota cannot be made.
    """
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
    """Return a command line that enters `group` and then runs the command `arguments`."""
    return ["sh", "-c", 'echo 0 >"$0" && exec "$@"', str(group / "cgroup.procs"), *arguments]


def enter(group: Path) -> None:
    """Move this process, and all processes that it starts from now on, to `group`.

    Raises `LabError` if that fails.
    """
    try:
        _write(group / "cgroup.procs", "0")
    except OSError as error:
        raise LabError(f"{group}: cannot be entered ({error.strerror})") from None


def members(group: Path) -> Iterator[int]:
    """Yield the process ids in `group`; nothing if the group does not exist."""
    with contextlib.suppress(OSError):
        yield from map(int, (group / "cgroup.procs").read_text(encoding="utf-8").split())


def all_groups() -> list[Path]:
    """Return the groups that any lab has made, recognised by their names."""
    hierarchy = find()
    if hierarchy is None:
        return []
    return sorted(
        e for e in hierarchy.root.iterdir() if owner_of(e.name) is not None and e.is_dir()
    )


def _write(file: Path, text: str) -> None:
    """Write `text` in one write call, as the kernel requires. Errors name the file."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(handle, text.encode())
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        os.close(handle)
