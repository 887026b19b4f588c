"""Device, compute dtype, CPU threads and allocator settings of a rank."""

from __future__ import annotations

import ctypes
import os
import platform
import time

import torch

from dilocox.config.site import SiteSection
from dilocox.errors import ConfigError
from dilocox.inner import cgroup

LARGE_BLOCK = 160 * 2**20
"""Bytes above which freed memory goes back to the system (`keep_freed_memory`). A micro-batch's
largest tensors, its chunks of logits (`head_loss.CHUNK`, in fp32), are smaller."""


def resolve_device(site: SiteSection, local_rank: int = 0) -> torch.device:
    """Return the device of the rank with number `local_rank` on its machine.

    `auto` takes a GPU if PyTorch sees one. Sites that share a machine may have more ranks than it
    has GPUs; then several ranks share a GPU. Raises `ConfigError` if a GPU is requested and
    missing, or if more ranks of one site start on the machine than it has GPUs.
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
    """Return the compute dtype, `torch.float32` or `torch.bfloat16`.

    `auto` takes bf16 if the hardware multiplies bf16 natively: GPUs since Ampere, CPUs with AVX-512
    BF16, AMX or Arm's BF16 instructions. On other hardware bf16 is emulated, and slower than fp32.
    """
    if site.precision == "fp32":
        return torch.float32
    if site.precision == "bf16":
        return torch.bfloat16
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = cpu_multiplies_bf16()
    return torch.bfloat16 if native else torch.float32


def cpu_multiplies_bf16() -> bool:
    """Return whether this machine's processor has instructions that multiply bf16."""
    capabilities = torch.cpu.get_capabilities()
    keys = ("avx512_bf16", "amx_bf16")
    if platform.machine() in ("aarch64", "arm64"):
        keys = ("bf16", "sve_bf16")
    return any(bool(capabilities.get(key)) for key in keys)


def available_cores() -> int:
    """Return the number of CPU cores that this process may use.

    The number is the size of its affinity mask, limited by the quotas of its control groups.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup.cores()
    return max(1, cores or 1) if quota is None else max(1, min(cores or 1, int(quota)))


def ran_and_kept_waiting() -> tuple[float, float]:
    """Return (seconds running on a core, seconds waiting for a core) of the calling thread.

    A thread waits for a core when it is ready to run while other threads hold its cores, or a quota
    is used up. The waiting time is known on Linux only (schedstats), else 0. Sleep counts as
    neither.
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            ran, waited = file.read().split()[:2]
    except (OSError, ValueError):
        return time.thread_time(), 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def set_threads(threads: int, ranks_here: int) -> int:
    """Set this rank's CPU threads and return their number.

    `threads` 0 shares the cores that this process may use among the `ranks_here` ranks of the
    machine.
    """
    count = threads or max(1, available_cores() // max(1, ranks_here))
    torch.set_num_threads(count)
    return count


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory instead of returning it to the system.

    This is for training on a CPU: otherwise large tensors of every micro-batch are mapped, zeroed
    and unmapped again, which takes a tenth of a step. Blocks of `LARGE_BLOCK` bytes and above, as
    exchanges of whole models need them, are returned: kept blocks of such sizes, freed in another
    order than allocated, took half as much memory again as the tensors in them. The setting holds
    for the whole process. Returns True if the C library supports it (glibc).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_threshold, never = -1, -3, 2**31 - 1
    return bool(mallopt(m_trim_threshold, never)) and bool(mallopt(m_mmap_threshold, LARGE_BLOCK))


def use_expandable_segments() -> None:
    """Let PyTorch grow its blocks of GPU memory in place, so that fewer bytes stay unused.

    Call this before the first allocation on a GPU, because PyTorch reads the setting then. A
    setting of the user in the environment stays.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which PyTorch reads first
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
