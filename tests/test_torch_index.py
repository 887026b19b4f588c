"""Which build of PyTorch `make setup` takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(TOOLS))
import torch_index  # noqa: E402

pytestmark = pytest.mark.waits

CPU = "https://download.pytorch.org/whl/cpu"


def smi(driver: str, cuda: str) -> str:
    return (
        "Mon Jan  5 10:00:00 2026\n"
        "+-----------------------------------------------------------------------------------+\n"
        f"| NVIDIA-SMI {driver}       Driver Version: {driver}     CUDA Version: {cuda}     |\n"
        "|-----------------------------------------+----------------------+------------------+\n"
    )


@pytest.mark.parametrize(
    ("driver", "cuda", "capabilities", "build"),
    [
        ("580.65.06", "13.0", "9.0\n9.0\n", "cu130"),
        ("595.10", "13.2", "10.0\n", "cu130"),
        ("570.133.20", "12.8", "9.0\n", "cu126"),
        ("550.54.15", "12.4", "8.0\n", "cu126"),
        ("525.85.12", "12.0", "7.5\n", "cu126"),
        ("580.65.06", "13.0", "7.0\n", "cu126"),
        ("580.65.06", "13.0", "6.1\n8.6\n", "cu126"),
        ("580.65.06", "13.0", "[N/A]\n", "cu130"),
        ("560.35.03", "12.6", "", "cu126"),
    ],
)
def test_the_drivers_cuda_chooses(driver: str, cuda: str, capabilities: str, build: str) -> None:
    choice = torch_index.choose(smi(driver, cuda), capabilities, None, linux=True)
    assert choice.index == f"https://download.pytorch.org/whl/{build}"
    assert choice.requirement is None


def test_a_new_gpu_with_an_older_driver_gets_the_last_release_with_cu128() -> None:
    for capability in ("10.0", "12.0"):
        choice = torch_index.choose(smi("570.133.20", "12.8"), capability, None, linux=True)
        assert choice.index == "https://download.pytorch.org/whl/cu128"
        assert choice.requirement == "torch==2.11.0"


def test_what_no_build_fits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CUDA 11\.4, PyTorch needs 12\.0 .* to 525 or newer"):
        torch_index.choose(smi("470.256.02", "11.4"), "8.0\n", None, linux=True)
    with pytest.raises(ValueError, match=r"capability 10\.0 needs 12\.8 .* to 580 or newer"):
        torch_index.choose(smi("560.35.03", "12.6"), "10.0\n", None, linux=True)


def test_without_a_gpu_and_elsewhere() -> None:
    assert torch_index.choose(None, "", None, linux=True).index == CPU
    assert torch_index.choose(None, "", None, linux=False).index is None
    unknown = torch_index.choose("| CUDA Version: N/A |", "9.0\n", None, linux=True)
    assert unknown.index is None


@pytest.mark.parametrize(
    ("value", "index"),
    [
        ("cu128", "https://download.pytorch.org/whl/cu128"),
        ("cpu", CPU),
        ("https://mirror.example/torch", "https://mirror.example/torch"),
        ("default", None),
    ],
)
def test_the_variable_overrides(value: str, index: str | None) -> None:
    for found in (None, smi("470.256.02", "11.4")):
        choice = torch_index.choose(found, "9.0\n", value, linux=True)
        assert (choice.index, choice.requirement) == (index, None)
        assert value in choice.why


def test_constraints_with_another_torch() -> None:
    text = "tomli_w==1.2.0\ntorch==2.13.0\ntorchft==0.2.0\n"
    changed = torch_index.with_torch(text, "torch==2.11.0")
    assert changed == "tomli_w==1.2.0\ntorch==2.11.0\ntorchft==0.2.0\n"
    assert torch_index.with_torch("torch<2.15\n", "torch==2.11.0") == "torch==2.11.0\n"
