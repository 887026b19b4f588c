"""The determinism class of a rank: all that the bits of its inner steps hang on beside their input.

Two ranks of one class are expected to compute the same bits. It errs on the side of too many
classes: a library may choose its kernels by the processor's model.
"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from dilocox.config import ModelSection
from dilocox.config_site import SiteSection

PACKAGES = ("torch", "transformers", "numpy")


def determinism_facts(
    site: SiteSection, model: ModelSection, device: torch.device, precision: torch.dtype
) -> dict[str, Any]:
    """The class of this process as it is set up now: plain texts, numbers and lists.

    `precision` is the compute dtype. To be called after threads and determinism were set.
    """
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": _device(device),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "precision": str(precision).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "matmul": torch.get_float32_matmul_precision(),
        "layout": {
            "stages": site.stages,
            "shards": site.shards,
            "chunks": site.chunks,
            "schedule": site.schedule,
            "micro_batch_size": site.micro_batch_size,
        },
        "attention": model.attention,
        "compile": model.compile,
    }


def processor() -> str:
    """The processor's name; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part"):
            return value.strip()
    return platform.processor()


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    )
