"""What a site's ranks are told."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import ConfigError
from dilocox.training.builder import Hooks
from dilocox.training.launch import forking
from dilocox.training.launch import site as site_process
from dilocox.training.launch.rank_job import RankJob

pytestmark = pytest.mark.waits


@pytest.mark.parametrize("shared", [True, False])
def test_sites_of_one_machine_have_ranks_of_different_numbers(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number on the machine is the number of the GPU, where there are enough."""
    config = resolve_run(
        {
            "run": {"folder": str(tmp_path)},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"stages": 2, "shards": 2, "batch_size": 8, "micro_batch_size": 2},
            "sites": {"paris": {}, "lyon": {}, "rome": {}},
        }
    )
    jobs: list[RankJob] = []

    def start(_: object, job: RankJob, *_more: object, name: str) -> Any:
        # Where its ranks meet, no other user of the machine can be.
        private = Path(str(job.meeting)).parent
        assert (private.stat().st_mode & 0o777, list(private.iterdir())) == (0o700, [])
        jobs.append(job)

    monkeypatch.setattr(site_process.processes, "start", start)
    monkeypatch.setattr(site_process.processes, "end", lambda *_, **__: None)
    monkeypatch.setattr(site_process, "enrol_site", lambda *_: None)
    monkeypatch.setattr(site_process, "check_ports", lambda *_: None)
    monkeypatch.setattr(site_process, "_watch", lambda *_: site_process.Ended(0))
    endpoint = Endpoint("https://localhost:1", {}, "")
    for site in ("lyon", "rome", "paris"):
        site_process.run_site(config, site, endpoint, Hooks(), False, tmp_path, shared)
        # It has joined on another machine.
        (tmp_path / f"site-{site}.jsonl").unlink()
    numbers = [job.local_rank for job in jobs]
    alone = [0, 1, 2, 3]
    assert numbers == ([4, 5, 6, 7, 8, 9, 10, 11, *alone] if shared else alone * 3)
    assert {job.ranks_here for job in jobs} == {12 if shared else 4}
    assert not any(Path(str(job.meeting)).parent.exists() for job in jobs)


def test_a_site_beside_the_coordinator_shares_with_sites_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three sites one joins on the coordinator's machine; the others train elsewhere."""
    config = resolve_run(
        {
            "run": {"folder": str(tmp_path)},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"stages": 2, "batch_size": 8, "micro_batch_size": 2},
            "sites": {"paris": {}, "lyon": {}, "rome": {}},
        }
    )
    jobs: list[RankJob] = []
    monkeypatch.setattr(
        site_process.processes, "start", lambda _, job, *more, name: jobs.append(job)
    )
    monkeypatch.setattr(site_process.processes, "end", lambda *_, **__: None)
    monkeypatch.setattr(site_process, "enrol_site", lambda *_: None)
    monkeypatch.setattr(site_process, "check_site", lambda *_: "127.0.0.1")
    monkeypatch.setattr(site_process, "_watch", lambda *_: site_process.Ended(0))
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "coordinator" / "endpoint.json").touch()
    endpoint = Endpoint("https://localhost:1", {}, "")

    def joins(site: str) -> list[tuple[int, int, bool]]:
        jobs.clear()
        site_process.run_site(config, site, endpoint, Hooks(), False, tmp_path, False)
        return [(job.local_rank, job.ranks_here, job.shared_folder) for job in jobs]

    assert joins("lyon") == [(2, 2, False), (3, 2, False)]
    # This process is noted as that of lyon, and lives.
    assert joins("rome") == [(4, 4, False), (5, 4, False)]
    gone = {"kind": "joined", "host": socket.gethostname(), "process": 2**22 + 1}
    for text in (json.dumps(gone), '"joined"', json.dumps({**gone, "host": "elsewhere"})):
        (tmp_path / "site-lyon.jsonl").write_text(text + "\n")
        assert joins("rome") == [(4, 2, False), (5, 2, False)]


def test_who_forks_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    asked: list[int] = []
    monkeypatch.setattr(forking.torch, "set_num_threads", asked.append)
    forking.stay_forkable()
    assert asked == [1]
    assert forking.os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


@pytest.fixture
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setattr(forking.torch, "set_num_threads", lambda count: None)


def test_a_notebook_that_has_used_a_gpu_is_refused(
    own_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process is there; runs on processors are not."""
    forking.stay_forkable()
    monkeypatch.setattr(forking.torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"has used CUDA already.*restart its kernel"):
        forking.stay_forkable()
    forking.stay_forkable("cpu")


def test_who_has_asked_for_gpus_may_have_spoiled_them_for_its_children(
    own_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.cuda.is_available()` alone does; where there is no GPU that is no matter."""
    monkeypatch.setattr(forking, "machine_has_gpu", lambda: True)
    # Other tests may have asked, in a CUDA build.
    monkeypatch.setattr(forking.torch.cuda, "_is_in_bad_fork", lambda: False)
    forking.stay_forkable()
    monkeypatch.setattr(forking.torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ConfigError, match="has used CUDA already"):
        forking.stay_forkable("cuda")
    monkeypatch.setattr(forking, "machine_has_gpu", lambda: False)
    forking.stay_forkable()
