"""Facts about the machine on which a benchmark runs."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return facts about the machine, without names of hosts or places."""
    import torch
    import transformers

    import dilocox
    from dilocox.utils import processes

    def quiet(_step: str, _share: float) -> None:
        """Report no progress, because both measurements take a second at most."""

    return {
        "cpu": _cpu_model(),
        **processes.call_in_child(_ask_the_processor, on_progress=quiet),
        "cores": _cores(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "gpu": processes.call_in_child(_ask_for_gpu, on_progress=quiet),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dilocox": dilocox.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def _ask_for_gpu(_progress: Callable[[str, float], None]) -> str | None:
    # In a child process: a process that has started CUDA cannot fork ranks that use it.
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _ask_the_processor(_progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Return the instruction set that torch uses, and GFLOP/s of one core in fp32 products of
    512 x 512. Processors of the same name, above all in virtual machines, differ threefold."""
    import torch

    torch.set_num_threads(1)
    square = torch.ones(512, 512)
    seconds = math.inf
    for _ in range(8):
        began = time.perf_counter()
        square @ square
        seconds = min(seconds, time.perf_counter() - began)
    return {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "core_gflops": round(2 * 512**3 / seconds / 1e9),
    }


def _cpu_model() -> str:
    described = Path("/proc/cpuinfo")
    for line in described.read_text(encoding="utf-8").splitlines() if described.exists() else ():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
