"""Peaks of GPUs, as the driver names them."""

from __future__ import annotations

import pytest
import torch

from dilocox.inner.peaks import peak_of, utilisation
from dilocox.tools.planner.hardware_table import HardwareTable

pytestmark = pytest.mark.waits

NAMES = {
    "a100-40g": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"],
    "a100-80g": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
    "a800-40g": ["NVIDIA A800-SXM4-40GB"],
    "a800-80g": ["NVIDIA A800-SXM4-80GB"],
    "h100-80g": ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"],
    "h200-141g": ["NVIDIA H200", "NVIDIA H200 NVL"],
    "b200-180g": ["NVIDIA B200"],
    "l40s": ["NVIDIA L40S"],
    "rtx4090": ["NVIDIA GeForce RTX 4090"],
    "rtx3090": ["NVIDIA GeForce RTX 3090"],
}


def test_the_peaks_are_those_of_the_planner() -> None:
    table = HardwareTable.load()
    gpus = {name for name in table.devices if not table.device(name).shared}
    assert gpus == NAMES.keys()
    for name, called in NAMES.items():
        device = table.device(name)
        for each in called:
            assert peak_of(each, torch.bfloat16) == pytest.approx(device.bf16), each
            assert peak_of(each, torch.float32) == pytest.approx(device.fp32), each


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Tesla T4",
        "NVIDIA H20",
        "",
    ],
)
def test_a_gpu_that_is_not_known_has_no_peak(name: str) -> None:
    assert peak_of(name, torch.bfloat16) is None


def test_boards_of_lower_clocks_have_peaks_of_their_own() -> None:
    peaks = [peak_of(f"NVIDIA H100 {kind}", torch.bfloat16) for kind in ("PCIe", "NVL")]
    assert peaks == [756e12, 835e12]


def test_utilisation() -> None:
    assert utilisation(6e9, 1000.0, 12e12) == pytest.approx(0.5)
    assert utilisation(6e9, 1000.0, None) is None
