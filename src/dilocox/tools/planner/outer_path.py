"""What the outer path costs at a site with GPUs: its maths on the hosts or on the GPUs, and copies.

With `outer.device = "cpu"` a rank's parameters cross PCIe as fp32 values: down at a boundary, down
and up at a landing. With `outer.device = "model"` values stay on the GPU and payloads cross. All
copies go through pinned memory (dilocox.outer.staging).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dilocox.config.run_config import RunConfig
from dilocox.tools.planner.hardware_table import Device, Host

OUTER_BYTES = 256
"""Read and written per parameter at a boundary and a landing on a GPU, operation by operation
(dilocox.outer.fragment_state; overlap `keep` with a residual)."""
AVERAGE_BYTES = 14
"""Read and written per value of a payload that is added to an average on a GPU."""
BOUNDARY_COPIES, LANDING_COPIES = 4, 8
"""Bytes per parameter that cross PCIe one way where the outer state is in the host's memory; ..."""
GRADIENT_COPIES = 4
"""... and of averaged gradients, which replace the GPU's."""


HANDED_ON = 4
"""Bytes per parameter that the first replica sends to the others after a landing, or after averaged
gradients have come (dilocox.inner.replicas)."""


def outer_path(config: RunConfig, device: Device, replica_rate: float = math.inf) -> Host:
    """The site's machine as exchanges of `config` find it beside `device`.

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
    """Bytes of fp32 per second by codec; on the host's figure where none is known of the GPU."""
    return {
        kind: 4 * memory_rate / moved[kind] if kind in moved else rate
        for kind, rate in on_host.items()
    }
