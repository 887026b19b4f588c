"""Checks, without starting CUDA, whether ranks use a GPU and whether its driver is new enough.

A process that has started CUDA cannot be forked. PyTorch only reports a driver that is too old
when CUDA starts, in every rank. Source of the lowest drivers: NVIDIA, "CUDA Compatibility",
section "minor version compatibility".
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
LOWEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Lowest major version of a Linux driver, by CUDA's major version."""


def ranks_use_gpu(config: RunConfig) -> bool:
    """Return whether ranks of this run use a GPU on this machine."""
    if config.site.device != "auto":
        return config.site.device == "cuda"
    return machine_has_gpu()


def machine_has_gpu() -> bool:
    """Return whether this machine has an NVIDIA driver and PyTorch is a build for CUDA."""
    return torch.version.cuda is not None and KERNEL_MODULE.exists()


def check_driver(config: RunConfig) -> None:
    """Raise `ConfigError` if ranks here would use a GPU whose driver is too old for this PyTorch.

    Nothing is refused if the kernel does not report the driver's version, as in WSL.
    """
    if torch.version.cuda is None or not ranks_use_gpu(config):
        return
    try:
        text = KERNEL_MODULE.read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    driver, cuda = driver_version(text), torch.version.cuda
    # NVIDIA's compatibility package lets an older driver run a newer CUDA. So ask its library.
    if driver_is_enough(driver, cuda) or _newest_cuda() >= _major(cuda):
        return
    raise ConfigError(
        f"NVIDIA driver {driver} is too old: PyTorch here is built for CUDA {cuda}, which needs "
        f"driver {LOWEST_DRIVER[_major(cuda)]} or newer; install a build that fits the driver "
        "(rm -r .venv; make setup chooses one, see docs/install.md), renew the driver, or set "
        'site.device = "cpu"'
    )


def driver_is_enough(driver: str | None, cuda: str) -> bool:
    """Return whether `driver` ("570.133.20") can run programs built for `cuda` ("13.0").

    True if either version is not known.
    """
    lowest = LOWEST_DRIVER.get(_major(cuda))
    return driver is None or lowest is None or _major(driver) >= lowest


def driver_version(text: str) -> str | None:
    """Return the version in the text of `/proc/driver/nvidia/version`. None if there is none."""
    for line in text.splitlines():
        if line.startswith("NVRM version:"):
            found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", line)
            return found[1] if found else None
    return None


def _newest_cuda() -> int:
    """Return the newest major version of CUDA that the driver's library supports; 0 if unknown.

    This call does not start CUDA.
    """
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value // 1000


def _major(version: str) -> int:
    return int(version.partition(".")[0])
