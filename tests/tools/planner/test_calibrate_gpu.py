"""What a GPU is measured with, and what follows from the times: all but the GPU itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.planned_runs import EMBEDDING, LAYER, TABLE, run

from dilocox.config.run_config import RunConfig, load_run
from dilocox.errors import TrainingError
from dilocox.tools.planner import calibrate, calibrate_gpu
from dilocox.tools.planner.hardware_table import GIB, HardwareTable
from dilocox.tools.planner.model_outline import ModelOutline

ROOT = Path(__file__).parents[3]
WHOLE = 4 * LAYER + 2 * EMBEDDING + 32
"""Parameters of the tests' model."""


def test_a_model_that_fits_is_stepped_as_it_is() -> None:
    config = run(
        site={"stages": 2, "shards": 2, "batch_size": 32, "micro_batch_size": 8},
        model={"activation_checkpointing": True},
    )
    found = calibrate_gpu.sized(config, GIB)
    assert ModelOutline.of(found).parameters == WHOLE
    assert (found.site.stages, found.site.shards) == (1, 1)
    assert found.site.batch_size == found.site.micro_batch_size == 8
    assert found.data.sequence_length == config.data.sequence_length
    assert found.model.activation_checkpointing


def test_a_large_model_keeps_the_width_of_its_layers() -> None:
    config = load_run(ROOT / "examples" / "qwen1.5-107b.toml")
    found = calibrate_gpu.sized(config, TABLE.device("h100-80g").memory)
    outline = ModelOutline.of(found)
    described = outline.hf_config
    assert (described.hidden_size, described.intermediate_size) == (8192, 49152)
    # A layer alone has more than a thousand million parameters: embedding and head are cut.
    assert (described.num_hidden_layers, described.vocab_size) == (1, 32_768)
    assert outline.parameters <= calibrate_gpu.MOST_PARAMETERS
    assert found.data.sequence_length == 2048
    assert found.site.micro_batch_size == 1


def test_layers_make_a_thousand_million_parameters() -> None:
    assert calibrate_gpu.layers_of(100_000_000, 90_000_000, most=32) == 10
    assert calibrate_gpu.layers_of(100_000_000, 90_000_000, most=4) == 4
    assert calibrate_gpu.layers_of(2_000_000_000, 90_000_000, most=4) == 1
    assert calibrate_gpu.vocabularies(151_936) == [151_936, 32_768, 8_192]
    assert calibrate_gpu.vocabularies(20_000) == [20_000, 8_192]


@pytest.mark.slow
def test_a_small_gpu_gets_fewer_layers_then_smaller_micro_batches() -> None:
    config = run(site={"batch_size": 16, "micro_batch_size": 16})
    full = calibrate_gpu.sized(config, 64 * GIB)
    assert (full.site.micro_batch_size, ModelOutline.of(full).parameters) == (16, WHOLE)
    fewer = calibrate_gpu.sized(config, 2_500_000)
    assert fewer.site.micro_batch_size == 16
    assert ModelOutline.of(fewer).parameters < WHOLE
    tight = calibrate_gpu.sized(config, 900_000)
    assert 1 <= tight.site.micro_batch_size < 16
    assert tight.site.batch_size == tight.site.micro_batch_size
    with pytest.raises(TrainingError, match=r"no layer of the run's model fits 0\.0 GiB"):
        calibrate_gpu.sized(config, 1000)


def test_without_a_run_file_the_model_is_one_that_fills_a_gpu() -> None:
    found = calibrate_gpu.large_run()
    outline = ModelOutline.of(found)
    assert 5e8 < outline.parameters < calibrate_gpu.PARAMETERS
    # All of it on a large GPU, of its width on a small one.
    large, small = (
        ModelOutline.of(calibrate_gpu.sized(found, TABLE.device(name).memory))
        for name in ("h100-80g", "rtx4090")
    )
    assert large.parameters == outline.parameters
    assert small.hf_config.hidden_size == 1024
    assert 1e8 < small.parameters < outline.parameters


class Clock:
    """A host that asks for work at once, and a GPU that is slow: `step` seconds each."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.now = self.done_at = 0.0
        self.asked = self.waited = 0

    def act(self) -> None:
        self.asked += 1
        self.done_at = max(self.done_at, self.now) + self.step

    def synchronize(self) -> None:
        self.waited += 1
        self.now = max(self.now, self.done_at)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("step", "count"), [(2.0**-13, 50), (0.125, 16), (5.0, 3)])
def test_steps_are_waited_for_together(step: float, count: int) -> None:
    clock = Clock(step)
    found = calibrate_gpu.seconds_of(clock.act, clock.synchronize, clock)
    assert found == pytest.approx(step)
    assert calibrate_gpu.batch_of(step) == count
    assert clock.asked == calibrate_gpu.WARM_UP + 1 + calibrate_gpu.BATCHES * count
    # Once after the warm-up, once after the first step, once for each batch.
    assert clock.waited == 2 + calibrate_gpu.BATCHES


def test_rates_from_times_by_hand() -> None:
    config = run(site={"batch_size": 2}, model={"activation_checkpointing": True})
    outline = ModelOutline.of(config)
    operations = 8 * outline.compute * 16 * 2
    found = calibrate_gpu.entry_of(config, outline, torch.bfloat16, (1.5, 3.5, 4.5))
    # A second for each micro-batch, half of one for the optimizer.
    assert found["bf16_tflops"] == pytest.approx(operations / 1e12)
    assert found["fp32_tflops"] == pytest.approx(operations / 4 / 1e12)
    assert found["memory_gb_s"] == pytest.approx(28 * outline.parameters / 0.5 / 1e9)
    assert (found["utilisation"], found["step_seconds"]) == (1.0, 1.5)


GPUS = [
    ("NVIDIA H100 80GB HBM3", 79.6, "h100-80g"),
    ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40g"),
    ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
    ("NVIDIA A800-SXM4-80GB", 79.2, "a800-80g"),
    ("NVIDIA H200", 140.4, "h200-141g"),
    ("NVIDIA B200", 178.0, "b200-180g"),
    ("NVIDIA L40S", 44.5, "l40s"),
    ("NVIDIA L40", 44.5, None),
    ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
    ("NVIDIA GeForce RTX 3090", 23.6, "rtx3090"),
    ("NVIDIA A10", 22.5, None),
    ("Tesla V100-SXM2-32GB", 31.7, None),
]


@pytest.mark.parametrize(("name", "gib", "entry"), GPUS)
def test_gpus_of_the_table_are_known_by_the_drivers_name(
    name: str, gib: float, entry: str | None
) -> None:
    assert calibrate_gpu.table_name(name, int(gib * GIB), TABLE) == entry


def test_where_the_rate_between_gpus_comes_from() -> None:
    def found(name: str, measured: float | None = None) -> tuple[float, str]:
        return calibrate_gpu.peer_rate(name, int(79.4 * GIB), measured, 2e10, TABLE)

    assert found("NVIDIA H100 80GB HBM3", 3e11) == (3e11, "copies between two GPUs of this machine")
    rate, source = found("NVIDIA H100 80GB HBM3")
    assert rate == 450e9
    assert "the table's h100-80g" in source
    rate, source = found("NVIDIA A100 80GB PCIe")
    assert rate == 2e10
    assert "no NVLink" in source
    rate, source = found("NVIDIA X1")
    assert rate == 2e10
    assert "the table knows no NVIDIA X1" in source


def test_a_measured_gpu_can_be_planned_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the GPU's answers to a table that is read again; the GPU is a stand-in."""
    about = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(79.6 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (78 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(calibrate, "resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(calibrate, "measure_loopback", lambda: 1e9)
    host = TABLE._content["host"]["default"]
    monkeypatch.setattr(calibrate, "measure_host", lambda: {"outer_ns": host["outer_ns"]})
    asked: list[tuple[str, tuple[int, ...]]] = []

    def seconds(
        run_: RunConfig, outline: ModelOutline, device: Any, precision: Any, counts: tuple[int, ...]
    ) -> list[float]:
        asked.append((str(precision), counts))
        return [0.1 + 0.2 * count for count in counts]

    monkeypatch.setattr(calibrate_gpu, "_step_seconds", seconds)
    monkeypatch.setattr(calibrate_gpu, "_copy_rates", lambda _: (5e10, None))
    said: list[str] = []
    written = calibrate.calibrate(run(site={"precision": "auto"}), said.append)
    assert asked == [("torch.bfloat16", (1, 3)), ("torch.float32", (1,))]
    assert any("0M parameters in bfloat16" in line for line in said)
    calibrate.write(written, tmp_path / "local.toml")
    found = HardwareTable.load(tmp_path / "local.toml").device("local")
    assert (found.pcie_rate, found.peer_rate) == (5e10, 450e9)
    assert not found.shared
    assert found.reserved > 0
