"""CPU affinity: keep a rank on the cores next to its GPU.

A rank that runs on another socket than its GPU feeds the GPU more slowly.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

PCI_DEVICES = Path("/sys/bus/pci/devices")


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores in Linux's format, `0-3,8,10-11`. Raises `ValueError` otherwise."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), int(last if dash else first) + 1))
    return found


def nearest_cores(present: set[int], node: str, local: str) -> set[int] | None:
    """Return the cores to which a process is to be restricted; None to change nothing.

    `present` are the cores that the process may use now. `node` and `local` are the texts of a PCI
    device's `numa_node` and `local_cpulist`. A process never gets a new core, and never loses its
    last core. Raises `ValueError` if a text is not in Linux's format.
    """
    if int(node) < 0:
        return None  # one NUMA node, or a machine that does not report nodes
    kept = present & parse_cores(local)
    return kept if kept and kept != present else None


def pci_name(domain: int, bus: int, device: int) -> str:
    """Return a GPU's name below /sys/bus/pci/devices; a GPU is function 0 of its PCI device."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def stay_near(
    device: torch.device, devices: Path = PCI_DEVICES, fit_threads: bool = False
) -> set[int] | None:
    """Keep the calling thread, and threads that it starts later, on the cores next to a GPU.

    Returns the cores. Returns None if nothing was changed: on CPUs, off Linux, and if the system
    does not name the near cores. Call this after the number of threads was chosen. With
    `fit_threads` PyTorch keeps at most one thread per remaining core.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return None
    found: Any = torch.cuda.get_device_properties(device)
    name = pci_name(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
    try:
        node, local = (
            (devices / name / file).read_text(encoding="ascii")
            for file in ("numa_node", "local_cpulist")
        )
        cores = nearest_cores(os.sched_getaffinity(0), node, local)
        if cores is not None:
            os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        log.info("GPU %s: the cores next to it are not known (%s)", name, error)
        return None
    if cores is not None:
        log.info("GPU %s: this rank stays on the %d cores next to it", name, len(cores))
        if fit_threads and torch.get_num_threads() > len(cores):
            torch.set_num_threads(len(cores))
    return cores
