"""What a rank finds on its machine: device, compute dtype, CPU threads."""

from __future__ import annotations

import ctypes
import os
import platform
import time

import torch

from dilocox.config.site import SiteSection
from dilocox.errors import ConfigError
from dilocox.inner import cgroup


def resolve_device(site: SiteSection, local_rank: int = 0) -> torch.device:
    """The device of the rank that is number `local_rank` on its machine.

    `auto` takes a GPU where PyTorch sees one. Several sites on one machine begin again with its
    first GPU when there are no more. Raises `ConfigError` if a GPU is asked for and missing, or
    if more ranks of a site start on the machine than it has GPUs.
    """
    if site.device == "cpu" or (site.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            'site.device: "cuda" but PyTorch sees no GPU here; use "auto" or "cpu", or check the '
            "driver and that PyTorch is a CUDA build"
        )
    count = torch.cuda.device_count()
    if local_rank >= count and site.ranks > count:
        raise ConfigError(
            f"site.device: rank {local_rank} of this machine has no GPU, there are "
            f'{count}; start fewer ranks here or use device = "cpu"'
        )
    return torch.device("cuda", local_rank % count)


def resolve_precision(site: SiteSection, device: torch.device) -> torch.dtype:
    """Compute dtype, `torch.float32` or `torch.bfloat16`.

    `auto` takes bf16 where the hardware multiplies it natively: GPUs since Ampere, CPUs with
    AVX-512 BF16, AMX or Arm's BF16 instructions. Elsewhere bf16 is emulated and slower than fp32.
    """
    if site.precision == "fp32":
        return torch.float32
    if site.precision == "bf16":
        return torch.bfloat16
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        capabilities = torch.cpu.get_capabilities()
        keys = ("avx512_bf16", "amx_bf16")
        if platform.machine() in ("aarch64", "arm64"):
            keys = ("bf16", "sve_bf16")
        native = any(bool(capabilities.get(key)) for key in keys)
    return torch.bfloat16 if native else torch.float32


def available_cores() -> int:
    """CPU cores that this process may use: its affinity mask, capped by its cgroups' quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup.cores()
    return max(1, cores or 1) if quota is None else max(1, min(cores or 1, int(quota)))


def ran_and_kept_waiting() -> tuple[float, float]:
    """Seconds that the calling thread has run on a core, and that it was ready to but kept from it
    by others on its cores, or by a quota.

    The latter are known on Linux only (schedstats), else 0. Time asleep is in neither.
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            ran, waited = file.read().split()[:2]
    except (OSError, ValueError):
        return time.thread_time(), 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def set_threads(threads: int, ranks_here: int) -> int:
    """Set this rank's CPU threads and return their number.

    `threads` 0 shares the machine's cores among the `ranks_here` ranks that run on it.
    """
    count = threads or max(1, available_cores() // max(1, ranks_here))
    torch.set_num_threads(count)
    return count


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory instead of handing it back to the system.

    For training on a CPU: large tensors of every micro-batch are otherwise mapped, zeroed and
    unmapped anew, a tenth of a step. For the whole process; true where it is supported (glibc).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_threshold, large = -1, -3, 2**31 - 1
    return bool(mallopt(m_trim_threshold, large)) and bool(mallopt(m_mmap_threshold, large))


def use_expandable_segments() -> None:
    """Let PyTorch grow its blocks of GPU memory in place, so that fewer bytes lie idle.

    Call this before the first allocation on a GPU, when PyTorch reads the setting. A setting of the
    user in the environment stays.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which PyTorch reads first
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
