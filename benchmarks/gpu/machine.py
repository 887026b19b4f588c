"""The head of the result file: GPU, driver, versions; and the first touch of host memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import Context, Outcome

TOUCHED = 40 << 30
"""Bytes of host memory that should be free. Some machines get memory only when they use it, and
dilocox looks at the free memory."""
TOUCH = """
import mmap, sys
size = int(sys.argv[1])
with mmap.mmap(-1, size) as block:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, 4096):
        block[at] = 1
"""
"""Script for a process of its own, because the system may end it."""


def run(context: Context) -> None:
    """Measure the row `machine`."""
    context.check("machine", lambda: _machine(context.scale))


def _machine(scale: str) -> Outcome:
    import torch

    import dilocox

    facts: dict[str, Any] = {
        "scale": scale,
        "gpu": None,
        "driver": _driver(),
        "gpu_memory_gib": None,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
        "transformers": importlib.metadata.version("transformers"),
        "dilocox": dilocox.__version__,
    }
    if scale == "gpu":
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["triton"] = _version("triton")
        facts["compiler"] = next(filter(shutil.which, ("gcc", "clang", "cc")), None)
        _touch()
    facts["memory_gib"] = round(_memory("MemTotal") / 2**30, 1)
    facts["memory_free_gib"] = round(_memory("MemAvailable") / 2**30, 1)
    return Outcome(True, "", facts)


def _touch() -> None:
    """Touch host memory if less than `TOUCHED` bytes are free."""
    if _memory("MemAvailable") >= TOUCHED:
        return
    size = min(TOUCHED, _memory("MemTotal") // 2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", TOUCH, str(size)], check=False, timeout=60)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory(name: str) -> int:
    """Return a value of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _driver() -> str | None:
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
