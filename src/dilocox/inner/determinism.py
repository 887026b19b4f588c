"""The determinism class of a rank: all facts on which the bits of its inner steps depend, other
than their input.

Two ranks of one class are expected to compute the same bits. There may be more classes than needed:
a library may choose its kernels by the processor's model, so the class names the model. The class
of a rank on a GPU has facts of the GPU instead, because the processor does not affect its bits.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dilocox.config.run_config import ModelSection
from dilocox.config.site import SiteSection
from dilocox.inner.attention import sdpa_backends
from dilocox.inner.compilation import compiles

PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Gpu:
    """A GPU and the libraries that compute on it. A text is empty if its fact is unknown."""

    name: str
    capability: str
    """Compute capability, such as "9.0"."""
    driver: str
    cuda: str
    cublas: str
    cudnn: str
    nccl: str
    attention: tuple[str, ...]
    """Enabled backends of PyTorch's attention, in the order in which PyTorch tries them."""
    flash_attention: str
    """Version of the package flash-attn."""

    def facts(self, model: ModelSection) -> dict[str, Any]:
        """Return the GPU's facts in the class of a rank with `model`, without the name."""
        return {
            "capability": self.capability,
            "driver": self.driver,
            "cuda": self.cuda,
            "cublas": self.cublas,
            "cudnn": self.cudnn,
            "nccl": self.nccl,
            "attention": self.flash_attention
            if model.attention == "flash_attention_2"
            else list(self.attention),
        }


def gpu_here(device: torch.device) -> Gpu:
    """Return the facts of the GPU `device` of this process."""
    major, minor = torch.cuda.get_device_capability(device)
    cuda = torch.version.cuda or ""
    return Gpu(
        name=torch.cuda.get_device_name(device),
        capability=f"{major}.{minor}",
        driver=_driver(),
        cuda=cuda,
        cublas=_cublas(cuda),
        cudnn=str(torch.backends.cudnn.version() or ""),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        attention=sdpa_backends(),
        flash_attention=_version("flash-attn"),
    )


def _driver() -> str:
    """Return the version of the NVIDIA driver, such as "580.65.06"; empty if unknown."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _cublas(cuda: str) -> str:
    """Return the version, major.minor.patch, of the cuBLAS that PyTorch has loaded for `cuda`.

    Empty if unknown.
    """
    try:
        library = ctypes.CDLL(f"libcublas.so.{cuda.partition('.')[0]}")
    except OSError:
        return ""
    numbers = []
    for which in range(3):
        value = ctypes.c_int(-1)
        if library.cublasGetProperty(which, ctypes.byref(value)) != 0:
            return ""
        numbers.append(value.value)
    return ".".join(map(str, numbers))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def determinism_facts(
    site: SiteSection,
    model: ModelSection,
    device: torch.device,
    precision: torch.dtype,
    gpu: Gpu | None = None,
) -> dict[str, Any]:
    """Return the determinism class of this process as it is set up now: texts, numbers and lists.

    Call this after `set_threads`, `set_determinism` and `settle_determinism`.

    Args:
        site: section `[site]` of the run file.
        model: section `[model]` of the run file.
        device: the rank's device.
        precision: the compute dtype.
        gpu: facts of a GPU `device`; None reads them from the machine.
    """
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "precision": str(precision).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "layout": {
            "stages": site.stages,
            "shards": site.shards,
            "chunks": site.chunks,
            "schedule": site.schedule,
            "micro_batch_size": site.micro_batch_size,
            # Left out with one replica, because earlier records do not have the key.
            **({"replicas": site.replicas} if site.replicas > 1 else {}),
        },
        "attention": model.attention,
        # A rank that falls back to eager execution keeps this fact: a fallback follows from the
        # model, the versions and the machine, which are facts, too.
        "compile": compiles(model.compile, site, device),
    }
    if precision is not torch.float32:
        # Earlier versions computed by autocast over fp32 parameters in stages without shards.
        facts["computation"] = f"{facts['precision']} copies of parameters"
    if device.type == "cuda":
        found = gpu or gpu_here(device)
        return {**facts, "device": found.name, "gpus": site.ranks, "gpu": found.facts(model)}
    return {
        **facts,
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
    }


def processor() -> str:
    """Return the processor's name; empty if the system does not report it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part"):
            return value.strip()
    return platform.processor()
