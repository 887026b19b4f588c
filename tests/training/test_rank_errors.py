"""Errors of libraries in one line, and whether another start would be of use."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.training import rank_errors
from dilocox.training.builder import RankPlace
from dilocox.training.launch import site
from dilocox.training.launch.supervisor import Ended, keep_in_run
from dilocox.training.rank_errors import LibraryError, explained
from dilocox.utils import processes

pytestmark = pytest.mark.waits

GIB = 2**30
PLACE = RankPlace("lyon", 0, 1)


def config(micro_batch_size: int = 4, activation_checkpointing: bool | str = False) -> RunConfig:
    return resolve_run(
        {
            "model": {
                "architecture": {"model_type": "qwen3"},
                "activation_checkpointing": activation_checkpointing,
            },
            "site": {"micro_batch_size": micro_batch_size, "batch_size": 16},
            "sites": {"lyon": {}},
        }
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which this rank had 70 GiB, and others have 6."""
    for name, answer in {
        "is_initialized": True,
        "current_device": 0,
        "mem_get_info": (4 * GIB, 80 * GIB),
        "max_memory_allocated": 64 * GIB,
        "max_memory_reserved": 74 * GIB,
        "memory_reserved": 70 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def said(error: Exception, run: RunConfig, first: bool = True) -> LibraryError:
    with pytest.raises(LibraryError) as caught, explained(run, PLACE, lambda: first):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total")


def test_a_gpu_that_is_full(gpu: None) -> None:
    assert str(said(FULL, config())) == (
        "lyon stage 0 shard 1: its GPU is out of memory: at most 64.0 GiB were allocated and "
        "74.0 GiB reserved of 80.0 GiB, 6.0 GiB are outside of PyTorch; lower "
        "site.micro_batch_size (now 4), or set model.activation_checkpointing = true, or raise "
        "site.shards or site.stages"
    )
    selective = str(said(FULL, config(activation_checkpointing="selective")))
    assert "or set model.activation_checkpointing = true, or" in selective
    # What cannot be lowered any more is not named.
    least = str(said(FULL, config(1, activation_checkpointing=True)))
    assert least.endswith("are outside of PyTorch; raise site.shards or site.stages")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    ],
)
def test_it_has_several_names(gpu: None, text: str) -> None:
    assert "its GPU is out of memory: at most" in str(said(RuntimeError(text), config()))


def test_a_gpu_that_says_nothing_any_more(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert "its GPU is out of memory; lower" in str(said(FULL, config()))


def test_what_was_too_much_in_the_first_round_is_too_much_again(gpu: None) -> None:
    starts: list[int] = []

    def start(first: bool) -> Ended:
        error = said(FULL, config(), first)
        starts.append(1)
        return Ended(1, str(error), error.permanent, took_part=True)

    timeouts: Any = SimpleNamespace(retry=0.0, retry_most=0.0, rejoin=1.0)
    ended = keep_in_run("lyon", lambda: start(True), timeouts, lambda line: None)
    assert (ended.permanent, len(starts)) == (True, 1)
    assert not said(FULL, config(), first=False).permanent


def test_a_machine_that_is_full() -> None:
    text = (
        "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    )
    with pytest.raises(RuntimeError, match="can't allocate memory") as real:
        torch.empty(10**15)
    for error in (RuntimeError(text), real.value, MemoryError()):
        line = str(said(error, config()))
        assert line.startswith("lyon stage 0 shard 1: this machine is out of memory")
        assert line.endswith("; run fewer ranks or sites on this machine, or give it more memory")


def test_an_operation_that_was_not_heard_of_at_the_start() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(LibraryError) as caught, explained(config(), PLACE, lambda: False):
            torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert str(caught.value) == (
        "lyon stage 0 shard 1: put_ has no deterministic kernel on this device; set "
        "site.deterministic = false"
    )
    assert caught.value.permanent


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, explained(config(), PLACE):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(caught.value, LibraryError)


def test_who_was_killed_may_have_been_so_for_memory() -> None:
    rank = processes.start(signal.pause, name="lyon-stage0-shard0")
    processes.end([rank], grace=0.0)
    assert site._died(rank) == (
        "lyon-stage0-shard0 was killed (signal 9); if nobody did that, memory has run out: "
        f"{rank_errors.HOST_MEND}"
    )
    other: Any = SimpleNamespace(name="lyon-stage0-shard0", exitcode=-signal.SIGSEGV)
    assert site._died(cast(Any, other)) == "lyon-stage0-shard0 was killed (signal 11)"


def test_a_rank_tells_that_its_failure_is_permanent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building and training are both explained."""
    from dilocox.training.launch import rank as rank_process

    told: list[tuple[str, bool]] = []

    def train(job: Any, errors: Any) -> None:
        with explained(config(), PLACE):
            raise FULL

    monkeypatch.setattr(rank_process, "set_up_log", lambda job: None)
    monkeypatch.setattr(rank_process, "train_rank", train)
    job: Any = SimpleNamespace(trace=None, place=PLACE)
    assert rank_process.run_rank(job, lambda *given: told.append(given)) == 1
    assert [permanent for _, permanent in told] == [True]
    assert "its GPU is out of memory" in told[0][0]
