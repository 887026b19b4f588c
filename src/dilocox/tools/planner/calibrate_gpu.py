"""Measures a GPU by steps that fill it: wide layers, the run's micro-batch, nothing read between.

A small model would measure how fast kernels are launched. Sizes and what follows from times are
pure functions; only `measure_gpu` needs a GPU.
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
"""Of the model that is stepped, at most where a model of one layer is no larger."""
MOST_PARAMETERS = 2_000_000_000
"""Of a model of one layer."""
VOCABULARIES = (32_768, 8_192)
"""Sizes of a vocabulary, where the model's own leaves no room for layers."""
MEMORY_SHARE = 0.85
"""Of the GPU's free memory, that the model may take."""
MICRO_BATCHES = 3
WARM_UP, LEAST, MOST = 3, 3, 50
"""Steps before any is timed; steps of a batch that is timed together."""
SECONDS = 2.0
"""That a batch takes, about."""
BATCHES = 3
"""Of which the fastest counts: other work on the machine only ever adds."""
COPIED = 1 << 28
"""Bytes that are copied to measure a bus."""
LIKE = 0.85
"""A GPU is one of the table's if it has so much of its memory."""


def large_run() -> RunConfig:
    """What is stepped where no run file is given: a model of the shape of Qwen3-0.6B."""
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
    """The run as a GPU with `memory` free bytes can step it: one rank, layers of the model's width,
    its own sequences and micro-batch.

    As many layers as make `PARAMETERS`. Where one layer does not fit, the vocabulary is cut, then
    the micro-batch is halved. Raises `TrainingError` if nothing fits.
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
    """Sizes to try, the model's own first."""
    return [own, *(size for size in VOCABULARIES if size < own)]


def _cut(
    raw: dict[str, Any], whole: ModelOutline, vocabulary: int, memory: int
) -> RunConfig | None:
    """The run with as many layers as it may have with this vocabulary; none if none fits."""
    try:
        outline = ModelOutline.of(reshaped(raw, whole, 1, vocabulary))
    except DilocoxError:
        return None  # its configuration needs more than the keys that are kept
    rest = outline.parameters - outline.layer_parameters
    most = int(whole.hf_config.num_hidden_layers)
    each = kept_by_precision(outline)  # the same of every layer, however many there are
    for layers in range(layers_of(rest, outline.layer_parameters, most), 0, -1):
        outline = ModelOutline.of(reshaped(raw, whole, layers, vocabulary))
        if outline.parameters <= MOST_PARAMETERS and fits(outline, memory, each):
            return outline.config
    return None


def layers_of(outside: int, layer: int, most: int) -> int:
    """Layers of a model of `PARAMETERS` at most, but one at least; `outside`: all other
    parameters."""
    return max(1, min(most, (PARAMETERS - outside) // max(1, layer)))


def in_precision(outline: ModelOutline, precision: str) -> ModelOutline:
    """The same model in another `site.precision`."""
    site = outline.config.site.model_copy(update={"precision": precision})
    return ModelOutline(outline.config.model_copy(update={"site": site}), outline.blueprint)


def kept_by_precision(outline: ModelOutline) -> dict[str, Kept]:
    """What a micro-batch keeps until its backward pass, by `site.precision`."""
    shapes = {precision: in_precision(outline, precision) for precision in ("bf16", "fp32")}
    return {precision: counted(shape.config, shape) for precision, shape in shapes.items()}


def fits(outline: ModelOutline, memory: int, each: Mapping[str, Kept]) -> bool:
    """Whether a step fits in every precision. `each`: as `kept_by_precision` gives it."""
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
    """Seconds of `act`, which only asks the GPU for work: of batches of it, each waited for once,
    the fastest."""
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
    """How many of what takes so long are timed together."""
    return min(MOST, max(LEAST, math.ceil(SECONDS / max(seconds, 1e-9))))


def table_name(name: str, memory: int, table: HardwareTable) -> str | None:
    """The entry of the table that a GPU is, by the driver's name of it and its bytes; or none."""
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
    """Bytes per second between two GPUs of a node, and where the figure comes from.

    `measured`: between two GPUs of this machine, if it has two; `pcie`: to the host, as measured.
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
    """Rates of a table's entry, from `seconds` of a step of one micro-batch, of one of
    `MICRO_BATCHES`, and of one of one micro-batch in the other precision."""
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
    """A table's entry of `device`, as measured. `config`: the run whose model is stepped, without
    it `large_run`. Raises `TrainingError` if the model does not fit or its loss is not finite."""
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
    """Seconds of a step of so many micro-batches, each."""
    gc.collect()  # a model before this one may hang in a cycle
    torch.cuda.empty_cache()
    model = build_model(run, outline, device, precision, compiled=True)
    found = []
    for count in micro_batches:
        size = (count * run.site.micro_batch_size, run.data.sequence_length)
        ids = torch.randint(0, int(outline.hf_config.vocab_size), size, device=device)
        results: list[Any] = []

        def step(ids: torch.Tensor = ids, results: list[Any] = results) -> None:
            # Nothing is read: the host is ahead of the GPU, as in training.
            results[:] = [model.inner_step(ids, ids, 1e-4)]

        found.append(seconds_of(step, lambda: torch.cuda.synchronize(device)))
        if not results[0].finite:
            raise TrainingError("calibration: a step of the model was not finite")
    return found


def _copy_rates(device: torch.device) -> tuple[float, float | None]:
    """Bytes per second to and from pinned memory, the slower way; and to another GPU, if any."""
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
