"""Memory and cores that a container allows its processes, from control groups of version 1 and 2.

A limit of a group also holds for all groups below it, so the functions read every ancestor. Version
1 mounts one hierarchy per controller; version 2 has one hierarchy. In a container, the mounted root
may be the container's own group, while `/proc/self/cgroup` still has the path on the host.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_memory() -> int | None:
    """Return the bytes that the machine, or the container of this process, has left.

    None if they are unknown.
    """
    known = [memory_left()]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                known.append(int(line.split()[1]) * 1024)
    return min((size for size in known if size is not None), default=None)


def memory_left(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that the process's groups may still allocate. None means no limit.

    File pages that the kernel can drop count as free.
    """
    found = []
    names = (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for controller, limit_name, used_name, cache_name in names:
        for group in _groups(controller, mount, membership):
            limit, used = _number(group / limit_name), _number(group / used_name)
            # Without a limit, version 1 reports the largest number of pages.
            if limit is None or used is None or limit >= 2**60:
                continue
            found.append(max(0, limit - used + _of_table(group / "memory.stat", cache_name)))
    return min(found, default=None)


def cores(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the number of cores that the quotas of the process's groups allow. None: no limit."""
    found = []
    for group in _groups("", mount, membership):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            found.append(int(quota) / int(period))
    for group in _groups("cpu", mount, membership):
        allowed, per = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if allowed is not None and per and allowed > 0:
            found.append(allowed / per)
    return min(found, default=None)


def _groups(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the process's group and of all groups above it.

    `controller`: name of a controller of version 1, or empty for version 2.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        own = PurePosixPath(path.lstrip("/") or ".")
        if controller and controller in names.split(","):
            roots = [mount / names, mount / controller]
        elif not controller and number == "0" and not names:
            # With hierarchies of version 1, version 2 is mounted in a subfolder, `unified`.
            roots = [mount, mount / "unified"]
        else:
            continue
        root = next((place for place in roots if place.is_dir()), None)
        if root is not None:
            yield from (root / place for place in (own, *own.parents) if (root / place).is_dir())


def _number(file: Path) -> int | None:
    """Return the number in a file; None if the file is missing or holds "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _of_table(file: Path, name: str) -> int:
    """Return the number of row `name` in a file of names and numbers; 0 if it is missing."""
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
        return int(rows.get(name, 0))
    return 0
