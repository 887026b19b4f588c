"""Ranks that torchrun or Slurm has started."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dilocox.errors import JoinError
from dilocox.training.launch.torchrun_env import RankVariables, rank_variables

pytestmark = pytest.mark.waits

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "alpha,beta",
}


def test_torchrun() -> None:
    assert rank_variables(TORCHRUN) == RankVariables(5, 8, 1, 4, "node0", "29400")
    assert rank_variables(SLURM | TORCHRUN) == rank_variables(TORCHRUN)


@pytest.mark.parametrize("missing", sorted(set(TORCHRUN) - {"LOCAL_WORLD_SIZE"}))
def test_half_of_torchruns_variables_are_no_launch(missing: str) -> None:
    assert rank_variables({k: v for k, v in TORCHRUN.items() if k != missing}) is None


def test_slurm() -> None:
    found = rank_variables(SLURM)
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.local_world) == (5, 8, 1, 4)
    assert found.master_address == "alpha"
    assert 1024 < int(found.master_port) < 32768
    given = rank_variables(SLURM | {"MASTER_ADDR": "gamma", "MASTER_PORT": "5"})
    assert given is not None
    assert (given.master_address, given.master_port) == ("gamma", "5")


def test_two_steps_of_one_slurm_job_meet_on_different_ports() -> None:
    ports = set()
    for step in range(40):
        found = rank_variables(SLURM | {"SLURM_STEP_ID": str(step)})
        assert found is not None
        ports.add(found.master_port)
    assert len(ports) == 40


@pytest.mark.parametrize("step", ["4294967291", "4294967292", "4294967290"])
def test_batch_scripts_and_interactive_shells_are_no_ranks(step: str) -> None:
    assert rank_variables(SLURM | {"SLURM_STEP_ID": step}) is None


def test_a_shell_by_srun_is_no_rank() -> None:
    """As `srun --gres=gpu:2 --pty bash` sets the variables; several tasks are ranks even so."""
    shell = SLURM | {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PTY_PORT": "44263",
    }  # fmt: skip
    assert rank_variables(shell) is None
    found = rank_variables(SLURM | {"SLURM_PTY_PORT": "44263"})
    assert found is not None
    assert found.rank == 5


def test_a_job_without_a_step_is_started_by_hand() -> None:
    assert rank_variables({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}) is None
    assert rank_variables({}) is None


@pytest.mark.parametrize("broken", [TORCHRUN | {"RANK": "one"}, SLURM | {"SLURM_LOCALID": ""}])
def test_variables_that_are_no_numbers(broken: dict[str, str]) -> None:
    with pytest.raises(JoinError, match=r"launcher variables: .*start the ranks with torchrun"):
        rank_variables(broken)


@pytest.mark.parametrize("launcher", [TORCHRUN, SLURM])
@pytest.mark.parametrize(
    ("shown", "device"),
    [({}, 1), ({"CUDA_VISIBLE_DEVICES": "0,1"}, 1), ({"CUDA_VISIBLE_DEVICES": "3"}, 0)],
)
def test_who_is_shown_one_gpu_takes_that(
    launcher: dict[str, str], shown: dict[str, str], device: int
) -> None:
    found = rank_variables(launcher | shown)
    assert found is not None
    assert (found.local_rank, found.device_number) == (1, device)


def test_node_lists_are_written_out_by_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\necho "$3" >> "$(dirname "$0")/asked"\necho n07\necho n08\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = rank_variables(SLURM | {"SLURM_STEP_NODELIST": "n[07-08]"})
    assert found is not None
    assert found.master_address == "n07"
    assert (tmp_path / "asked").read_text() == "n[07-08]\n"


def test_without_slurms_tools_the_address_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JoinError, match="set MASTER_ADDR to the first node"):
        rank_variables(SLURM | {"SLURM_STEP_NODELIST": "n[07-08]"})


def test_torch_reads_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    found = rank_variables(SLURM)
    assert found is not None
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found.export()
    assert {k: os.environ[k] for k in TORCHRUN if k != "LOCAL_WORLD_SIZE"} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "alpha",
        "MASTER_PORT": found.master_port,
    }
