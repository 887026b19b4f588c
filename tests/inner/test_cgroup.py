"""Limits of a container, of both versions of control groups, written as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dilocox.inner import cgroup

pytestmark = pytest.mark.waits

GIB = 2**30


def place(root: Path, membership: str, files: Mapping[str, object]) -> tuple[Path, Path]:
    """The mount and the file of memberships."""
    mount = root / "cgroup"
    mount.mkdir()
    (root / "self").write_text(membership)
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{text}\n")
    return mount, root / "self"


def test_memory_of_version_2_is_bounded_by_every_group_above(tmp_path: Path) -> None:
    files = {
        "a/memory.max": 4 * GIB, "a/memory.current": 3 * GIB,
        "a/memory.stat": f"anon 1\ninactive_file {GIB // 2}",
        "a/b/memory.max": "max", "a/b/memory.current": GIB,
    }  # fmt: skip
    assert cgroup.memory_left(*place(tmp_path, "0::/a/b\n", files)) == 3 * GIB // 2


def test_memory_of_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": GIB,
        "memory/docker/x/memory.limit_in_bytes": GIB,
        "memory/docker/x/memory.usage_in_bytes": 2 * GIB,
    }
    where = place(tmp_path, "4:cpu,cpuacct:/\n5:memory:/docker/x\n", files)
    assert cgroup.memory_left(*where) == 0
    assert cgroup.cores(*where) is None


def test_in_a_container_the_mounted_root_is_its_own_group(tmp_path: Path) -> None:
    """Version 1 without a namespace of its own: the path is that on the host."""
    files = {
        "memory/memory.limit_in_bytes": GIB,
        "memory/memory.usage_in_bytes": 0,
        "cpu,cpuacct/cpu.cfs_quota_us": 50_000,
        "cpu,cpuacct/cpu.cfs_period_us": 100_000,
    }
    text = "4:cpu,cpuacct:/kubepods/pod1\n5:memory:/kubepods/pod1\n0::/system.slice\n"
    where = place(tmp_path, text, files)
    assert cgroup.memory_left(*where) == GIB
    assert cgroup.cores(*where) == 0.5


def test_cores_of_version_2_are_bounded_by_every_group_above(tmp_path: Path) -> None:
    files = {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}
    where = place(tmp_path, "0::/a/b\n", files)
    assert cgroup.cores(*where) == 2.5
    assert cgroup.memory_left(*where) is None


def test_no_limit_and_no_groups(tmp_path: Path) -> None:
    where = place(tmp_path, "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 9})
    assert cgroup.cores(*where) is None
    assert cgroup.memory_left(tmp_path / "none", tmp_path / "missing") is None
    assert cgroup.cores(tmp_path / "none", tmp_path / "missing") is None


def test_what_is_free_is_the_smaller_of_machine_and_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "memory_left", lambda: 1000)
    assert cgroup.available_memory() == 1000
    monkeypatch.setattr(cgroup, "memory_left", lambda: None)
    assert (cgroup.available_memory() or 2**60) > 1000
