"""Measures this machine: a real inner step, codecs, the outer step, and a link.

The result is a table with entries like those of `devices.toml`, under the name `local`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import DilocoxError, TrainingError
from dilocox.inner import (
    SiteModel,
    available_cores,
    keep_freed_memory,
    resolve_device,
    resolve_precision,
)
from dilocox.tools.planner.calibrate_gpu import measure_gpu
from dilocox.tools.planner.hardware_table import GIB, LOCAL, LOOPBACK, MEASURED, WIRE_SHARE
from dilocox.tools.planner.host_benchmark import measure_host, measure_loopback, timed
from dilocox.tools.planner.link_probe import MeasuredLink, measure_link
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.step_time import RECOMPUTED
from dilocox.tools.planner.trial_run import (
    alone,
    build_model,
    named,
    optimizer_rate,
    reshaped,
    small_run,
    split,
)
from dilocox.utils.storage import overwrite

Progress = Callable[[str], None]
LARGEST = 60_000_000
"""Most parameters of the model that is stepped on processors; a larger model is cut down."""
TOKENS = 512
"""Longest sequence, in tokens, of the steps that are timed on processors."""
MICRO_BATCHES = 3
"""Micro-batches of the second timed step. The first one has 1, so the difference is computation."""
MOST_NARROWED = 256
"""Largest factor by which the model's width is divided."""


def calibrate(
    config: RunConfig | None, progress: Progress, peer: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Measure this machine, and return a table with `gpu.local`, `host.local` and one link.

    Args:
        config: The run whose model is stepped. None: a small model. On processors the model is
            cut down (`cut_down`), on a GPU it is sized to fill it (`calibrate_gpu.sized`).
        progress: Called with the name of each measurement.
        peer: Host and port of a machine that runs `dilocox plan --answer`; the link to it becomes
            `link.measured`. None: this machine's own loopback becomes `link.loopback`.

    Raises:
        DilocoxError: A step cannot be taken here, or the link cannot be measured.
    """
    source = f"dilocox plan --calibrate, {time.strftime('%Y-%m-%d')}"
    if peer is None:
        progress("loopback")
        rate = measure_loopback()
        link = {LOOPBACK: {**link_entry(MeasuredLink(rate, rate, 5e-5)), "usd_per_gb": 0.0}}
    else:
        # The link comes first, so that a peer that does not answer is reported at once.
        link = {MEASURED: link_entry(measure_link(*peer, progress))}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = _measure_device(config, progress)
        progress("codecs and outer step, one thread")
        host = {**measure_host(), "memory_gib": _machine_memory() / GIB}
    finally:
        torch.set_num_threads(before)
    for entry in (device, host, *link.values()):
        entry["source"] = source
    return {
        "gpu": {LOCAL: {**device, "host": LOCAL}},
        "host": {LOCAL: host},
        "link": link,
    }


def link_entry(measured: MeasuredLink) -> dict[str, Any]:
    """Return a measured link as a table entry: rates on the wire, packet headers included."""

    def on_the_wire(rate: float) -> str:
        kbit = max(1, round(8 * rate / WIRE_SHARE / 1e3))
        # Rates in a table have at most six digits.
        return f"{kbit}kbit" if kbit < 10**6 else f"{kbit / 1e3:.3f}mbit"

    return {
        "up": on_the_wire(measured.up),
        "down": on_the_wire(measured.down),
        "rtt_ms": round(1000 * measured.rtt, 3),
    }


def write(table: dict[str, Any], path: Path) -> None:
    """Write a calibration as TOML. Raises `TrainingError` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        overwrite(path, tomli_w.dumps(table))
    except OSError as error:
        raise TrainingError(
            f"{path}: cannot be written ({error.strerror}); choose another file with --to"
        ) from None


def cut_down(config: RunConfig) -> RunConfig:
    """Return a run that processors can step: one rank, short sequences, at most `LARGEST`
    parameters.

    A larger model keeps its type and proportions, but gets two layers, a vocabulary of 8,192 and,
    if needed, narrower layers. If its configuration does not allow that, `small_run` is returned.
    """
    raw = alone(
        config,
        max(1, min(config.site.micro_batch_size, 4)),
        min(TOKENS, config.data.sequence_length),
    )
    run = resolve_run(raw, where="the run to calibrate with")
    whole = outline = ModelOutline.of(run)
    factor = 1
    while outline.parameters > LARGEST and factor <= MOST_NARROWED:
        try:
            run = reshaped(raw, whole, 2, 8192, factor)
            outline = ModelOutline.of(run)
        except DilocoxError:
            return small_run()
        factor *= 2
    return run if outline.parameters <= LARGEST else small_run()


def _measure_device(config: RunConfig | None, progress: Progress) -> dict[str, Any]:
    """Measure this machine's GPU or, without a GPU, one core of its processors."""
    device = resolve_device((config or small_run()).site)
    if device.type == "cuda":
        return measure_gpu(config, device, progress)
    return _measure_core(config or small_run(), device, progress)


def _measure_core(config: RunConfig, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Measure real inner steps on one core, and return a device's table entry.

    Times are processor time, so that other work on the machine hardly counts. In the precision
    that the run does not use, only a step of one sequence is timed: processors without bf16
    multiplication would take long for more.
    """
    run = cut_down(config)
    outline = ModelOutline.of(run)
    precision = resolve_precision(run.site, device)
    usual = resolve_precision(run.site.model_copy(update={"precision": "auto"}), device)
    keep_freed_memory()
    rows = run.site.micro_batch_size

    def timed_step(model: SiteModel, rows: int) -> float:
        ids = torch.randint(0, int(outline.hf_config.vocab_size), (rows, run.data.sequence_length))

        def step() -> None:
            if not model.inner_step(ids, ids, 1e-4).finite:
                raise TrainingError("calibration: a step of the model was not finite")

        return timed(step)

    progress(f"inner steps of the run's model in {named(precision)}")
    model = build_model(run, outline, device, precision)
    one = timed_step(model, rows)
    each, fixed = split(one, timed_step(model, MICRO_BATCHES * rows), MICRO_BATCHES)
    del model
    again = RECOMPUTED[run.model.activation_checkpointing]
    per_row = (6 + again) * outline.compute * run.data.sequence_length
    rates = {precision: per_row * rows / each / 1e12}
    other = torch.float32 if precision == torch.bfloat16 else torch.bfloat16
    progress(f"an inner step in {named(other)}")
    site = run.site.model_copy(update={"micro_batch_size": 1, "batch_size": 1})
    small = run.model_copy(update={"site": site})
    seconds = timed_step(build_model(small, outline, device, other), 1)
    rates[other] = per_row / max(seconds - fixed, seconds / 2) / 1e12
    return {
        "bf16_tflops": rates[torch.bfloat16],
        "fp32_tflops": rates[torch.float32],
        "utilisation": 1.0,
        "memory_gib": _machine_memory() / GIB,
        "memory_gb_s": optimizer_rate(run, outline, fixed, 1e12 * rates[precision]) / 1e9,
        "peer_gb_s": 10.0,
        "shared": True,
        "cores": float(available_cores()),
        "stepped_parameters": outline.parameters,
        "step_seconds": one,
        "precision": named(usual),
    }


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
