"""Measures a GPU with inner steps that fill it: wide layers, and the run's own micro-batch.

Steps of a small model would only measure how fast kernels are launched. Nothing is read from the
GPU between steps. Only `measure_gpu` needs a GPU; sizes, and rates from times, are pure functions.
"""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import DilocoxError, TrainingError
from dilocox.inner import resolve_precision
from dilocox.tools.planner.activations import Kept
from dilocox.tools.planner.hardware_table import GIB, GpuPlacement, HardwareTable
from dilocox.tools.planner.memory_footprint import counted, footprints
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.step_time import RECOMPUTED
from dilocox.tools.planner.trial_run import (
    alone,
    build_model,
    named,
    optimizer_rate,
    reshaped,
    split,
)

Progress = Callable[[str], None]
PARAMETERS = 1_000_000_000
"""Most parameters of the model that is stepped, unless a single layer makes it larger."""
MOST_PARAMETERS = 2_000_000_000
"""Most parameters of a model of one layer."""
VOCABULARIES = (32_768, 8_192)
"""Smaller vocabularies to try if the model does not fit with its own."""
MEMORY_SHARE = 0.85
"""Share of the GPU's free memory that the model may take."""
MICRO_BATCHES = 3
"""Micro-batches of the second timed step. The first one has 1, so the difference is computation."""
WARM_UP, LEAST, MOST = 3, 3, 50
"""Steps before the first timed one; least and most steps that are timed together as a batch."""
SECONDS = 2.0
"""Approximate duration of a batch of steps."""
BATCHES = 3
"""Batches that are timed. The fastest counts, because other work can only add time."""
COPIED = 1 << 28
"""Bytes that are copied to measure a bus."""
LIKE = 0.85
"""Least ratio of a table entry's memory to the GPU's memory at which they are the same GPU."""


def large_run() -> RunConfig:
    """Return the run to step if no run file is given: a model of the shape of Qwen3-0.6B."""
    return resolve_run(
        {
            "model": {
                "architecture": {
                    "model_type": "qwen3",
                    "hidden_size": 1024,
                    "intermediate_size": 3072,
                    "num_hidden_layers": 28,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "vocab_size": 151_936,
                    "tie_word_embeddings": True,
                }
            },
            "data": {"sequence_length": 2048, "tokenizer": "given"},
            "site": {"batch_size": 4, "micro_batch_size": 4},
            "sites": {"here": {}},
        }
    )


def sized(config: RunConfig, memory: int) -> RunConfig:
    """Return a run of one rank that a GPU with `memory` free bytes can step.

    Width, sequence length and micro-batch are the run's own. The number of layers is cut to
    `PARAMETERS`. If not even one layer fits, the vocabulary is cut first, then the micro-batch is
    halved. Raises `TrainingError` if nothing fits.
    """
    rows = config.site.micro_batch_size
    while rows >= 1:
        raw = alone(config, rows, config.data.sequence_length)
        whole = ModelOutline.of(resolve_run(raw, where="the run to calibrate with"))
        if whole.parameters <= PARAMETERS and fits(whole, memory, kept_by_precision(whole)):
            return whole.config
        for vocabulary in vocabularies(int(whole.hf_config.vocab_size)):
            found = _cut(raw, whole, vocabulary, memory)
            if found is not None:
                return found
        rows //= 2
    raise TrainingError(
        f"calibration: no layer of the run's model fits {memory / GIB:.1f} GiB of free GPU memory; "
        "give a run file of a smaller model, or free the GPU"
    )


def vocabularies(own: int) -> list[int]:
    """Return the vocabulary sizes to try, the model's own first."""
    return [own, *(size for size in VOCABULARIES if size < own)]


def _cut(
    raw: dict[str, Any], whole: ModelOutline, vocabulary: int, memory: int
) -> RunConfig | None:
    """Return the run with the most layers that fit with this vocabulary. None if no layer fits."""
    try:
        outline = ModelOutline.of(reshaped(raw, whole, 1, vocabulary))
    except DilocoxError:
        return None  # the model's configuration needs keys that `reshaped` does not keep
    rest = outline.parameters - outline.layer_parameters
    most = int(whole.hf_config.num_hidden_layers)
    each = kept_by_precision(outline)  # per layer, so it does not depend on their number
    for layers in range(layers_of(rest, outline.layer_parameters, most), 0, -1):
        outline = ModelOutline.of(reshaped(raw, whole, layers, vocabulary))
        if outline.parameters <= MOST_PARAMETERS and fits(outline, memory, each):
            return outline.config
    return None


def layers_of(outside: int, layer: int, most: int) -> int:
    """Return the number of layers, from 1 to `most`, of a model with at most `PARAMETERS`.

    `outside`: parameters outside of layers. `layer`: parameters of one layer.
    """
    return max(1, min(most, (PARAMETERS - outside) // max(1, layer)))


def in_precision(outline: ModelOutline, precision: str) -> ModelOutline:
    """Return the outline of the same model with another `site.precision`."""
    site = outline.config.site.model_copy(update={"precision": precision})
    return ModelOutline(outline.config.model_copy(update={"site": site}), outline.blueprint)


def kept_by_precision(outline: ModelOutline) -> dict[str, Kept]:
    """Return what a micro-batch keeps until its backward pass, by `site.precision`."""
    shapes = {precision: in_precision(outline, precision) for precision in ("bf16", "fp32")}
    return {precision: counted(shape.config, shape) for precision, shape in shapes.items()}


def fits(outline: ModelOutline, memory: int, each: Mapping[str, Kept]) -> bool:
    """Return whether a step fits in memory in every precision.

    `memory`: free bytes of the GPU. `each`: the result of `kept_by_precision`.
    """
    table = HardwareTable.load()
    place = GpuPlacement(table.device(table.devices[0]), 1, 1)
    for precision, kept in each.items():
        shape = in_precision(outline, precision)
        (found,) = footprints(shape.config, shape, place, kept)
        if found.device > MEMORY_SHARE * memory:
            return False
    return True


def seconds_of(
    act: Callable[[], object],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of one call of `act`, which only queues work on the GPU.

    Calls are timed in batches, with one `synchronize` per batch. The fastest batch counts.
    """
    for _ in range(WARM_UP):
        act()
    synchronize()
    start = clock()
    act()
    synchronize()
    count = batch_of(clock() - start)
    found = []
    for _ in range(BATCHES):
        start = clock()
        for _ in range(count):
            act()
        synchronize()
        found.append((clock() - start) / count)
    return max(1e-9, min(found))


def batch_of(seconds: float) -> int:
    """Return the number of calls per batch, if one call takes `seconds`."""
    return min(MOST, max(LEAST, math.ceil(SECONDS / max(seconds, 1e-9))))


def table_name(name: str, memory: int, table: HardwareTable) -> str | None:
    """Return the name of a GPU's entry in the table. None if the table has none.

    `name`: the driver's name of the GPU. `memory`: bytes of its memory.
    """
    words = re.findall("[a-z0-9]+", name.lower())
    pairs = [first + second for first, second in pairwise(words)]  # `rtx 4090`
    for entry in table.devices:
        device, model = table.device(entry), entry.partition("-")[0]
        known = model in words or model in pairs
        if known and not device.shared and LIKE * memory <= device.memory <= memory:
            return entry
    return None


def peer_rate(
    name: str, memory: int, measured: float | None, pcie: float, table: HardwareTable
) -> tuple[float, str]:
    """Return the bytes per second between two GPUs of a node, and the source of the figure.

    Args:
        name: The driver's name of the GPU.
        memory: Bytes of its memory.
        measured: Bytes per second between two GPUs of this machine. None: it has only one GPU.
        pcie: Measured bytes per second between the GPU and the host.
        table: Table of known GPUs.
    """
    if measured is not None:
        return measured, "copies between two GPUs of this machine"
    entry = table_name(name, memory, table)
    if entry is None:
        return pcie, f"PCIe to the host, as measured: the table knows no {name}"
    if "PCIE" in name.upper():
        return pcie, f"PCIe to the host, as measured: a {name} has no NVLink"
    return table.device(entry).peer_rate, f"the table's {entry}: there is no second GPU here"


def entry_of(
    run: RunConfig,
    outline: ModelOutline,
    precision: torch.dtype,
    seconds: tuple[float, float, float],
) -> dict[str, Any]:
    """Return a table entry's rates, computed from the times of three steps.

    Args:
        run: The run that was stepped.
        outline: Outline of its model.
        precision: Precision of the first two steps.
        seconds: Seconds of a step of one micro-batch, of a step of `MICRO_BATCHES`, and of a step
            of one micro-batch in the other precision.
    """
    one, several, other_one = seconds
    each, fixed = split(one, several, MICRO_BATCHES)
    again = RECOMPUTED[run.model.activation_checkpointing]
    rows = run.site.micro_batch_size
    operations = (6 + again) * outline.compute * run.data.sequence_length * rows
    other = torch.float32 if precision == torch.bfloat16 else torch.bfloat16
    rates = {
        precision: operations / each / 1e12,
        other: operations / max(other_one - fixed, other_one / 2) / 1e12,
    }
    return {
        "bf16_tflops": rates[torch.bfloat16],
        "fp32_tflops": rates[torch.float32],
        "utilisation": 1.0,
        "memory_gb_s": optimizer_rate(run, outline, fixed, 1e12 * rates[precision]) / 1e9,
        "stepped_parameters": outline.parameters,
        "step_seconds": one,
    }


def measure_gpu(
    config: RunConfig | None, device: torch.device, progress: Progress
) -> dict[str, Any]:
    """Measure `device`, and return its table entry.

    `config`: the run whose model is stepped; None: `large_run`. Raises `TrainingError` if the
    model does not fit, or its loss is not finite.
    """
    free, _ = torch.cuda.mem_get_info(device)
    run = sized(config or large_run(), free)
    outline = ModelOutline.of(run)
    precision = resolve_precision(run.site, device)
    other = torch.float32 if precision == torch.bfloat16 else torch.bfloat16
    usual = resolve_precision(run.site.model_copy(update={"precision": "auto"}), device)
    progress(f"inner steps of {outline.parameters / 1e6:,.0f}M parameters in {named(precision)}")
    one, several = _step_seconds(run, outline, device, precision, (1, MICRO_BATCHES))
    progress(f"inner steps in {named(other)}")
    (other_one,) = _step_seconds(run, outline, device, other, (1,))
    progress("copies over PCIe and between GPUs")
    pcie, peer = _copy_rates(device)
    about = torch.cuda.get_device_properties(device)
    rate, source = peer_rate(about.name, about.total_memory, peer, pcie, HardwareTable.load())
    return {
        **entry_of(run, outline, precision, (one, several, other_one)),
        "memory_gib": about.total_memory / GIB,
        "pcie_gb_s": pcie / 1e9,
        "peer_gb_s": rate / 1e9,
        "peer_source": source,
        "shared": False,
        "cores": 1.0,
        "precision": named(usual),
    }


def _step_seconds(
    run: RunConfig,
    outline: ModelOutline,
    device: torch.device,
    precision: torch.dtype,
    micro_batches: tuple[int, ...],
) -> list[float]:
    """Return the seconds of a step for each number of micro-batches in `micro_batches`."""
    gc.collect()  # a reference cycle may keep the previous model alive
    torch.cuda.empty_cache()
    model = build_model(run, outline, device, precision, compiled=True)
    found = []
    for count in micro_batches:
        size = (count * run.site.micro_batch_size, run.data.sequence_length)
        ids = torch.randint(0, int(outline.hf_config.vocab_size), size, device=device)
        results: list[Any] = []

        def step(ids: torch.Tensor = ids, results: list[Any] = results) -> None:
            # Nothing is read back, so that the host runs ahead of the GPU, as in training.
            results[:] = [model.inner_step(ids, ids, 1e-4)]

        found.append(seconds_of(step, lambda: torch.cuda.synchronize(device)))
        if not results[0].finite:
            raise TrainingError("calibration: a step of the model was not finite")
    return found


def _copy_rates(device: torch.device) -> tuple[float, float | None]:
    """Return (rate to or from pinned memory, rate to another GPU), in bytes per second.

    The slower direction counts for pinned memory. The second rate is None with only one GPU.
    """
    here = torch.empty(COPIED, dtype=torch.uint8, device=device)
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)

    def rate(into: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            into.copy_(source, non_blocking=True)

        def synchronize() -> None:
            for each in {into.device, source.device}:
                if each.type == "cuda":
                    torch.cuda.synchronize(each)

        return COPIED / seconds_of(copy, synchronize)

    pcie = min(rate(host, here), rate(here, host))
    if torch.cuda.device_count() < 2:
        return pcie, None
    second = torch.device("cuda", 1 if device.index != 1 else 0)
    return pcie, rate(torch.empty(COPIED, dtype=torch.uint8, device=second), here)
