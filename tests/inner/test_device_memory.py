"""The peak of a rank's memory, between two readings."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.inner import device_memory
from dilocox.inner.device_memory import CudaMemory, MemoryUse, ProcessMemory, high_water

pytestmark = pytest.mark.waits


class Allocator:
    """PyTorch's, as far as it is asked."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}
        self.resets = 0

    def memory_stats(self, _device: torch.device) -> dict[str, Any]:
        return self.stats

    def reset_peak_memory_stats(self, _device: torch.device) -> None:
        self.resets += 1


def test_a_gpu_is_read_from_one_reading_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_stats", allocator.memory_stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset_peak_memory_stats)
    allocator.stats = {"num_alloc_retries": 4, "allocated_bytes.all.peak": 99}
    meter = CudaMemory(torch.device("cuda", 0))
    assert allocator.resets == 1, "what came before, loading say, is of no round"
    allocator.stats = {
        "num_alloc_retries": 5,
        "allocated_bytes.all.peak": 10,
        "reserved_bytes.all.peak": 20,
    }
    assert meter.read() == MemoryUse(peak=10, reserved=20, retries=1)
    assert allocator.resets == 2
    assert meter.read().retries == 0


@pytest.mark.skipif(platform.system() != "Linux", reason="needs /proc")
def test_the_peak_of_a_process_is_of_the_round_alone() -> None:
    if not device_memory.CLEAR_REFS.exists():
        pytest.skip("the kernel keeps no peak")
    meter = ProcessMemory()
    if meter.read().peak is None:
        pytest.skip("the peak cannot be set back here")
    # Mapped, not allocated: another test may have told the C library to keep what is freed.
    with mmap.mmap(-1, 256 << 20) as block:
        block.write(b"x" * len(block))
        large = meter.read().peak
    meter.read()
    small = meter.read().peak
    assert large is not None
    assert small is not None
    assert large - small > 200 << 20


def test_without_the_right_to_set_the_peak_back_nothing_is_said(tmp_path: Path) -> None:
    assert ProcessMemory(tmp_path / "status", tmp_path / "none" / "clear").read().peak is None


def test_what_the_system_says() -> None:
    assert high_water("Name:\tx\nVmHWM:\t    12 kB\nVmRSS:\t 3 kB\n") == 12 * 1024
    assert high_water("Name:\tx\n") is None
