"""Cost of boundaries, exchanges and landings at a site with GPUs: computation and PCIe copies.

With `outer.device = "cpu"` a rank's parameters cross PCIe as fp32 values: to the host at a
boundary, to the host and back at a landing. With `outer.device = "model"` values stay on the GPU
and only payloads cross. All copies go through pinned memory (`dilocox.outer.staging`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dilocox.config.run_config import RunConfig
from dilocox.tools.planner.hardware_table import Device, Host

OUTER_BYTES = 256
"""Bytes of GPU memory that a boundary and a landing read and write per parameter.

Counted operation by operation in `dilocox.outer.fragment_state`, with overlap `keep` and a
residual."""
AVERAGE_BYTES = 14
"""Bytes of GPU memory read and written per value of a payload that is added to an average."""
BOUNDARY_COPIES, LANDING_COPIES = 4, 8
"""Bytes per parameter that cross PCIe at a boundary and at a landing, with the outer state in host
memory."""
GRADIENT_COPIES = 4
"""The same at a landing of averaged gradients, which replace the GPU's gradients."""


HANDED_ON = 4
"""Bytes per parameter that the first replica sends to the others after a landing, or after averaged
gradients have come (dilocox.inner.replicas)."""


def outer_path(config: RunConfig, device: Device, replica_rate: float = math.inf) -> Host:
    """Return the speeds of exchange work at a site with `device`, PCIe copies included.

    `replica_rate`: bytes per second from a rank to the same rank of another replica.
    """
    host = device.host
    if device.shared:
        return host
    host = _beside_gpu(config, device)
    if config.site.replicas == 1:
        return host
    return replace(host, landing_copies=host.landing_copies + HANDED_ON / replica_rate)


def _beside_gpu(config: RunConfig, device: Device) -> Host:
    host = device.host
    if config.outer.device == "cpu":
        landing = GRADIENT_COPIES if config.exchanges_gradients else LANDING_COPIES
        return replace(
            host,
            boundary_copies=BOUNDARY_COPIES / device.pcie_rate,
            landing_copies=landing / device.pcie_rate,
        )
    return replace(
        host,
        encode=_rates(device.encode_bytes, host.encode, device.memory_rate),
        decode=_rates(device.decode_bytes, host.decode, device.memory_rate),
        average=4 * device.memory_rate / AVERAGE_BYTES,
        lowrank=device.rate(bf16=False) / 2,
        outer=OUTER_BYTES / device.memory_rate,
        payload_copies=1 / device.pcie_rate,
        codecs_beside=False,
    )


def _rates(
    moved: Mapping[str, float], on_host: Mapping[str, float], memory_rate: float
) -> dict[str, float]:
    """Return the fp32 bytes per second by kind of codec on a GPU.

    A codec without a figure for GPUs keeps the host's rate.
    """
    return {
        kind: 4 * memory_rate / moved[kind] if kind in moved else rate
        for kind, rate in on_host.items()
    }
