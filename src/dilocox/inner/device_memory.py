"""Meters of a rank's peak memory, and of the retries of its allocator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Text that resets the peak of the resident memory to the present size (Linux, proc(5))."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory use since the last reading, in bytes."""

    peak: int | None
    """On a GPU: peak of the tensors' bytes. On a CPU: peak of the process's resident memory. None
    if unknown."""
    reserved: int | None = None
    """On a GPU: peak of the bytes that PyTorch's allocator held. None on a CPU."""
    retries: int | None = None
    """On a GPU: how often the allocator freed all its unused blocks and tried again. None on a CPU.
    """


class MemoryMeter(Protocol):
    """Reads the peak of a rank's memory."""

    def read(self) -> MemoryUse:
        """Return the peak since the last reading, or since the meter was made; then reset it."""


class CudaMemory:
    """Meter of PyTorch's caching allocator on one GPU. No call waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = 0
        self.read()

    def read(self) -> MemoryUse:
        """See `MemoryMeter`."""
        found = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        retries = int(found.get("num_alloc_retries", 0))
        before, self._retries = self._retries, retries
        return MemoryUse(
            peak=int(found.get("allocated_bytes.all.peak", 0)),
            reserved=int(found.get("reserved_bytes.all.peak", 0)),
            retries=retries - before,
        )


class ProcessMemory:
    """Meter of this process on Linux. Readings are None elsewhere, or if the peak cannot be
    reset."""

    def __init__(self, status: Path = STATUS, clear: Path = CLEAR_REFS) -> None:
        self._status, self._clear = status, clear
        self._works = self._begin_anew()

    def read(self) -> MemoryUse:
        """See `MemoryMeter`."""
        if not self._works:
            return MemoryUse(None)
        peak = high_water(self._status.read_text(encoding="ascii", errors="replace"))
        self._works = self._begin_anew()
        return MemoryUse(peak)

    def _begin_anew(self) -> bool:
        try:
            self._clear.write_text(RESET_PEAK, encoding="ascii")
        except OSError:
            return False
        return True


def high_water(status: str) -> int | None:
    """Return the bytes of `VmHWM` in the text of /proc/PID/status; None without such a line."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return None


def memory_meter(device: torch.device) -> MemoryMeter:
    """Return the meter of a rank that trains on `device`."""
    return CudaMemory(device) if device.type == "cuda" else ProcessMemory()
