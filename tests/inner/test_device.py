"""Device, precision, chunk placement and what is refused."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from datetime import timedelta
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.config.site import SiteSection
from dilocox.errors import ConfigError
from dilocox.inner import (
    SiteMesh,
    available_cores,
    chunks_of_stage,
    place_of_rank,
    rank_of_place,
    resolve_device,
    resolve_precision,
    set_determinism,
    set_threads,
    stage_of_chunk,
    start_site_group,
    use_expandable_segments,
)
from dilocox.inner.device import LARGE_BLOCK, ran_and_kept_waiting
from dilocox.inner.head_loss import CHUNK
from dilocox.utils import processes

pytestmark = pytest.mark.waits

CPU = torch.device("cpu")


@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble"]),
    stages=st.integers(1, 8),
    chunks=st.integers(1, 4),
)
def test_every_chunk_has_one_stage(schedule: str, stages: int, chunks: int) -> None:
    held = [chunks_of_stage(schedule, stages, chunks, stage) for stage in range(stages)]
    assert sorted(chain.from_iterable(held)) == list(range(stages * chunks))
    for stage, numbers in enumerate(held):
        assert numbers == sorted(numbers)
        assert all(stage_of_chunk(schedule, stages, chunks, n) == stage for n in numbers)


def test_v_schedule_goes_down_and_back_up() -> None:
    assert [chunks_of_stage("zbv", 3, 2, stage) for stage in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [stage_of_chunk("zbv", 3, 2, chunk) for chunk in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [chunks_of_stage("interleaved-1f1b", 2, 2, stage) for stage in range(2)] == [
        [0, 2],
        [1, 3],
    ]


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_precision(SiteSection(precision="fp32"), CPU) is torch.float32
    assert resolve_precision(SiteSection(precision="bf16"), CPU) is torch.bfloat16
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for capabilities, wanted in [
        ({"avx512_f": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert resolve_precision(SiteSection(), CPU) is wanted


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device(SiteSection(device="cpu")) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(SiteSection()) == CPU
    with pytest.raises(ConfigError, match=r"site\.device.*no GPU"):
        resolve_device(SiteSection(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(SiteSection(), 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="rank 2 of this machine has no GPU"):
        resolve_device(SiteSection(stages=3), 2)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(4, [0, 1, 2, 3]), (8, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0])],
)
def test_sites_on_one_machine_have_gpus_of_their_own(
    gpus: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    site = SiteSection(stages=2)
    assert [resolve_device(site, number).index for number in range(4)] == expected


def test_threads_are_shared_among_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_cores() >= 1
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr("dilocox.inner.device.available_cores", lambda: 8)
    assert [set_threads(0, 3), set_threads(0, 16), set_threads(5, 2)] == [2, 1, 5]
    assert given == [2, 1, 5]


def test_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_determinism(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    # Else every new tensor would be filled first.
    assert not torch.utils.deterministic.fill_uninitialized_memory
    set_determinism(False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("theirs", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_blocks_of_gpu_memory_grow_unless_the_user_says_otherwise(
    theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    if theirs:
        monkeypatch.setenv(theirs, "max_split_size_mb:256")
    use_expandable_segments()
    found = {name: value for name, value in os.environ.items() if name.endswith("_ALLOC_CONF")}
    assert found == (
        {theirs: "max_split_size_mb:256"}
        if theirs
        else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    )


def _reads_the_setting() -> None:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:perhaps"
    try:
        torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.5")
    except Exception as error:
        sys.exit(3 if "perhaps" in str(error) else 4)


def test_pytorch_reads_the_setting_that_a_forked_rank_has_made() -> None:
    """The process that a rank is forked from has imported PyTorch."""
    rank = processes.start(_reads_the_setting, name="rank")
    rank.join(30)
    assert rank.exitcode == 3


def test_one_rank_needs_no_group() -> None:
    mesh = SiteMesh.create(1, 1, CPU)
    assert mesh.mesh is None
    assert (mesh.rank, mesh.ranks) == (0, 1)
    assert mesh.gather(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]
    assert place_of_rank(5, 2, 3) == (2, 1, 0)
    assert place_of_rank(11, 2, 3) == (2, 1, 1)
    assert rank_of_place(2, 1, 1, shards=2, stages=3) == 11


def test_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 ranks were started for stages x shards = 2 x 1"):
        SiteMesh.create(2, 1, CPU)


def test_no_meeting_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="no address at which to meet"):
        start_site_group(2, 1, CPU, timedelta(seconds=5))


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="needs schedstats")
def test_a_thread_knows_how_long_it_was_kept_waiting() -> None:
    """Beside another one on the same core, of which both get half."""
    core = {min(os.sched_getaffinity(0))}
    spin = f"import os\nos.sched_setaffinity(0, {core})\nprint(flush=True)\nwhile True: pass"
    before = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-I", "-c", spin], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(0, core)
            ran, kept = ran_and_kept_waiting()
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass
            ran, kept = (
                now - then for now, then in zip(ran_and_kept_waiting(), (ran, kept), strict=True)
            )
        finally:
            os.sched_setaffinity(0, before)
            other.kill()
    assert 0.19 < ran < 0.3
    assert kept > 0.5 * ran


KEPT = """
import os
import torch
from dilocox.inner.device import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
keep_freed_memory()
for size in ({sizes}):
    before = resident()
    block = torch.ones(size, dtype=torch.uint8)
    assert resident() - before >= size - 2**20
    del block
    print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_tensors_of_a_micro_batch_are_kept_and_those_of_an_exchange_returned() -> None:
    """In a process of its own, because the setting stays."""
    logits, chunk = 4 * CHUNK["cpu"], LARGE_BLOCK + 2**20
    code = KEPT.format(sizes=f"{logits}, {chunk}")
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    kept_logits, kept_chunk = map(int, told.stdout.split())
    assert kept_logits >= logits - 2**20
    assert kept_chunk < 2**20
