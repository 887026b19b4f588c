"""Peak rates of GPUs by the name that the driver gives them, for the model FLOPs utilisation (MFU).

Figures are operations per second of dense matrix products. If the planner's table
(tools/planner/devices.toml) has the GPU, the figures are those of the table, which names the
sources; a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """Operations per second of one GPU, by compute dtype."""

    bf16: float
    fp32: float

    def of(self, precision: torch.dtype) -> float:
        """Return the peak for `torch.bfloat16` or `torch.float32`."""
        return self.bf16 if precision is torch.bfloat16 else self.fp32


_A100 = Peak(312 * TERA, 19.5 * TERA)
_HOPPER = Peak(989 * TERA, 67 * TERA)

PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"A100|A800", _A100),
    # NVIDIA H100 data sheet: PCIe and NVL boards run at lower clocks than SXM modules.
    (r"H100 PCIe", Peak(756 * TERA, 51 * TERA)),
    (r"H100 NVL", Peak(835 * TERA, 60 * TERA)),
    (r"H100|H800|H200|GH200", _HOPPER),
    (r"B200|GB200", Peak(2250 * TERA, 75 * TERA)),
    (r"L40S", Peak(362 * TERA, 91.6 * TERA)),
    (r"RTX 4090(?! D)", Peak(165.2 * TERA, 82.6 * TERA)),
    (r"RTX 3090(?! Ti)", Peak(71.2 * TERA, 35.6 * TERA)),
)
"""(pattern of the name that the driver reports, peak); the first pattern that matches counts."""

_SLOWER = re.compile(r"\bMIG\b|Laptop|Max-Q")
"""Names of parts of a GPU, and of GPUs that only share a name with a faster GPU. Their peak is
unknown."""


def peak_of(name: str, precision: torch.dtype) -> float | None:
    """Return the peak operations per second of the GPU called `name`; None if it is unknown."""
    if _SLOWER.search(name):
        return None
    for pattern, peak in PEAKS:
        if re.search(rf"\b(?:{pattern})(?![0-9A-Z])", name):
            return peak.of(precision)
    return None


def utilisation(
    flops_per_token: float, tokens_per_second: float, peak: float | None
) -> float | None:
    """Return the MFU as a fraction of 1: the model's operations per second over the devices' peak.

    `flops_per_token` are the operations of training one token without recomputation: 6 per
    parameter of a matrix product, and attention. `peak` is the peak of all devices together. None
    if unknown.
    """
    return flops_per_token * tokens_per_second / peak if peak else None
