"""A rank that fails ends its site at once, whatever its process group waits for."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.training.builder import Hooks
from dilocox.training.launch import rank as rank_process
from dilocox.training.launch import site as site_process
from dilocox.training.launch import torchrun
from dilocox.training.launch.rank_job import RankJob
from dilocox.training.launch.torchrun_env import RankVariables
from dilocox.utils import processes

pytestmark = pytest.mark.waits

LONG = 600.0
"""Seconds that a failed rank's group would wait for its peers: NCCL's until its time limit.

So long that a busy machine, which takes its time to start processes, is told from such a wait."""


def two_stages(folder: Path) -> RunConfig:
    return resolve_run(
        {
            "run": {"folder": str(folder)},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"stages": 2, "batch_size": 8, "micro_batch_size": 2},
            "sites": {"paris": {}, "lyon": {}},
        }
    )


def fails_beside_one_that_waits(job: RankJob, *_: object) -> None:
    """Stage 0 is in a collective that never ends; stage 1 fails."""
    if job.place.stage == 0:
        time.sleep(LONG)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a site of two ranks whose process groups hang when they are destroyed."""
    told: list[str] = []
    monkeypatch.setattr(rank_process, "train_rank", fails_beside_one_that_waits)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: time.sleep(LONG))
    monkeypatch.setattr(site_process, "enrol_site", lambda *_: None)
    monkeypatch.setattr(site_process.SiteLine, "took_part", lambda _: False)
    monkeypatch.setattr(
        site_process.SiteLine, "leave", lambda _, reason, *, failed: told.append(reason)
    )
    config = two_stages(tmp_path)

    def run() -> tuple[Any, float]:
        begin = time.monotonic()
        endpoint = Endpoint("https://localhost:1", {"paris": "token"}, "")
        ended = site_process.run_site(config, "paris", endpoint, Hooks(), False, tmp_path, True)
        assert told == [ended.reason]
        return ended, time.monotonic() - begin

    return run


def test_a_log_that_cannot_be_written_is_the_reason(
    site: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("no folder")
    ended, _ = site()
    assert ended.code == 1
    assert ended.reason.startswith("paris stage ")
    assert f": {tmp_path / 'logs'}: cannot be used (File exists); move it away, or" in ended.reason
    assert "Traceback" not in capfd.readouterr().err


def test_its_group_is_not_waited_for(site: Any, tmp_path: Path) -> None:
    ended, seconds = site()
    assert seconds < LONG / 4
    assert ended.code == 1
    assert ended.reason == (
        "paris stage 1 shard 0: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    said = (tmp_path / "logs" / "paris-stage1-shard0.log").read_text()
    assert "Traceback" in said, "its log is whole"


def test_its_own_end_is_not_waited_for(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has said is enough, though its process does not get to its end."""

    def hangs(code: int) -> None:
        time.sleep(LONG)
        os._exit(code)

    monkeypatch.setattr(processes, "exit_now", hangs)
    ended, seconds = site()
    assert seconds < LONG / 4
    assert "illegal memory access" in ended.reason


def under_a_launcher(folder: Path, grouped: bool) -> None:
    """One rank of two that torchrun has started; it fails."""
    config = two_stages(folder)
    dist.is_initialized = lambda: grouped  # type: ignore[assignment]
    torchrun.exchange_address = lambda *_: "127.0.0.1"  # type: ignore[assignment]
    torchrun.agree = lambda *_: "identity"  # type: ignore[assignment]
    torchrun.sharing_cores = lambda *_: 2  # type: ignore[assignment]
    torchrun.Identity.from_text = lambda text: text  # type: ignore
    torchrun.meeting_place = lambda *_: contextlib.nullcontext(dist.HashStore())  # type: ignore
    torchrun.run_rank = lambda *_: 1  # type: ignore[assignment]
    variables = RankVariables(1, 2, 1, 2, "127.0.0.1", "1")
    endpoint = Endpoint("https://localhost:1", {"paris": "token"}, "")
    code = torchrun.join_as_rank(
        config,
        "paris",
        endpoint,
        variables,
        torchrun.Preparation(check=lambda: None, fetch=lambda: None),
        False,
    )
    sys.exit(code + 10)


@pytest.mark.parametrize(("grouped", "code"), [(True, 1), (False, 11)])
def test_under_a_launcher_too(tmp_path: Path, grouped: bool, code: int) -> None:
    """With a group that is there it does not come to its clean-up, where NCCL would wait."""
    rank = processes.start(under_a_launcher, tmp_path, grouped, name="launched")
    rank.join(LONG / 4)
    try:
        assert rank.exitcode == code
    finally:
        processes.end([rank], grace=0.0)
