"""Control groups of both versions: where they are found, what is written; quotas that hold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dilocox.tools.testbed import cgroups
from dilocox.tools.testbed.cgroups import Hierarchy
from dilocox.tools.testbed.commands import LabError

pytestmark = pytest.mark.alone


def mounts(folder: Path, *lines: str) -> Path:
    file = folder / "mounts"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def version_2(folder: Path, controllers: str = "cpu io memory") -> str:
    folder.mkdir()
    (folder / "cgroup.controllers").write_text(f"{controllers}\n", encoding="utf-8")
    (folder / "cgroup.subtree_control").write_text("", encoding="utf-8")
    return f"cgroup2 {folder} cgroup2 rw,nosuid 0 0"


def test_both_versions_are_found(tmp_path: Path) -> None:
    two = version_2(tmp_path / "unified")
    assert cgroups.find(mounts(tmp_path, "proc /proc proc rw 0 0", two)) == Hierarchy(
        tmp_path / "unified", 2
    )
    one = f"cgroup {tmp_path / 'cpu'} cgroup rw,relatime,cpu,cpuacct 0 0"
    assert cgroups.find(mounts(tmp_path, one)) == Hierarchy(tmp_path / "cpu", 1)


def test_a_mixed_system_has_the_controller_where_it_is(tmp_path: Path) -> None:
    two = version_2(tmp_path / "unified", "hugetlb")
    one = f"cgroup {tmp_path / 'cpu'} cgroup rw,cpu 0 0"
    assert cgroups.find(mounts(tmp_path, two, one)) == Hierarchy(tmp_path / "cpu", 1)
    assert cgroups.find(mounts(tmp_path, two, "cgroup /x cgroup rw,cpuset 0 0")) is None
    assert cgroups.find(tmp_path / "none") is None


def test_a_group_of_version_2_gets_quota_and_period(tmp_path: Path) -> None:
    version_2(tmp_path / "unified")
    group = cgroups.make(Hierarchy(tmp_path / "unified", 2), "dilocox-1-at-paris", 0.45)
    assert (group / "cpu.max").read_text() == "9000 20000"
    assert (group / "cpu.weight").read_text() == "10000"
    assert (tmp_path / "unified" / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_group_of_version_1_gets_quota_and_period(tmp_path: Path) -> None:
    group = cgroups.make(Hierarchy(tmp_path, 1), "dilocox-1-at-paris", 1.5)
    assert (group / "cpu.cfs_quota_us").read_text() == "30000"
    assert (group / "cpu.cfs_period_us").read_text() == "20000"
    assert (group / "cpu.shares").read_text() == "102400"
    free = cgroups.make(Hierarchy(tmp_path, 1), "dilocox-1-at-hub", None)
    assert [file.name for file in free.iterdir()] == ["cpu.shares"]


def test_the_reason_is_said_where_groups_cannot_be_made(tmp_path: Path) -> None:
    assert "not mounted here" in str(cgroups.unsupported_reason(None))
    said = str(cgroups.unsupported_reason(Hierarchy(tmp_path / "missing", 1)))
    assert "a CPU quota cannot be set (No such file or directory)" in said
    with pytest.raises(LabError, match="cannot be entered"):
        cgroups.enter(tmp_path / "missing")
    assert list(cgroups.members(tmp_path / "missing")) == []


def test_a_command_enters_its_group_before_it_begins(tmp_path: Path) -> None:
    command = cgroups.entered(tmp_path, [sys.executable, "-c", "pass"])
    done = os.spawnvp(os.P_WAIT, command[0], command)
    assert done == 0
    assert (tmp_path / "cgroup.procs").read_text() == "0\n"
