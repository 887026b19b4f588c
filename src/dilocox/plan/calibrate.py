"""Measures this machine: a real inner step, codecs, the outer step, and a link.

What comes out is a table entry like those of `devices.toml`, under the name `local`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch

from dilocox.config import RunConfig, resolve_run
from dilocox.errors import DilocoxError, TrainingError
from dilocox.models import build_chunk, materialise, open_weights
from dilocox.plan.link_probe import MeasuredLink, measure_link
from dilocox.plan.measure import measure_host, measure_loopback, timed
from dilocox.plan.outline import Outline
from dilocox.plan.step import OPTIMIZER_BYTES, orthonormalising_flops
from dilocox.plan.table import GIB, LOCAL, LOOPBACK, MEASURED, WIRE_SHARE
from dilocox.site import (
    SiteMesh,
    SiteModel,
    available_cores,
    keep_freed_memory,
    resolve_device,
    resolve_precision,
)

Progress = Callable[[str], None]
LARGEST = 60_000_000
"""Parameters of the model that is really stepped; layers are left out above that."""
TOKENS = 512
"""Longest sequence of the steps that are timed."""
MICRO_BATCHES = 3
MOST_NARROWED = 256
NARROWED = (
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
    "num_attention_heads",
    "num_key_value_heads",
)


def calibrate(
    config: RunConfig | None, progress: Progress, peer: tuple[str, int] | None = None
) -> dict[str, Any]:
    """A table with `gpu.local`, `host.local` and a link, as measured on this machine.

    `config`: the run whose model is stepped (fewer layers, a shorter sequence and one stage if it
    is large); without it a small one. `peer`: host and port of a machine that answers
    (`link_probe`), the link to which is `link.measured`; without one `link.loopback` is written.
    Raises `DilocoxError` if a step cannot be taken here, or the link cannot be measured.
    """
    source = f"dilocox plan --calibrate, {time.strftime('%Y-%m-%d')}"
    if peer is None:
        progress("loopback")
        rate = measure_loopback()
        link = {LOOPBACK: {**link_entry(MeasuredLink(rate, rate, 5e-5)), "usd_per_gb": 0.0}}
    else:
        # First: that nobody answers is known at once.
        link = {MEASURED: link_entry(measure_link(*peer, progress))}
    run = config or small_run()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = _measure_device(run, progress)
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
    """A link as tables have it: with the headers that travel beside what was counted."""

    def on_the_wire(rate: float) -> str:
        kbit = max(1, round(8 * rate / WIRE_SHARE / 1e3))
        # A rate has six digits at most.
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
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except OSError as error:
        raise TrainingError(
            f"{path}: cannot be written ({error.strerror}); choose another file by --to"
        ) from None


def small_run() -> RunConfig:
    """What is stepped where no run file is given: a Qwen3 of about 4M parameters."""
    return resolve_run(
        {
            "model": {
                "architecture": {
                    "model_type": "qwen3",
                    "hidden_size": 256,
                    "intermediate_size": 768,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 32,
                    "vocab_size": 4096,
                    "tie_word_embeddings": True,
                }
            },
            "site": {"batch_size": 4, "micro_batch_size": 4},
            "sites": {"here": {}},
        }
    )


def cut_down(config: RunConfig) -> RunConfig:
    """The run as it can be stepped here: one rank, short sequences, a model of `LARGEST` at most.

    A larger model keeps its type and proportions, with two layers and a vocabulary of 8,192; where
    its configuration does not allow that, `small_run` is stepped instead.
    """
    raw = config.model_dump(mode="json", exclude_none=True)
    rows = max(1, min(config.site.micro_batch_size, 4))
    raw["site"] |= {
        "stages": 1,
        "shards": 1,
        "chunks": 1,
        "schedule": "1f1b",
        "micro_batch_size": rows,
        "batch_size": rows,
    }
    raw["data"]["sequence_length"] = min(TOKENS, config.data.sequence_length)
    raw["outer"] = {"steps": 1, "inner_steps": 1, "method": "diloco"}
    raw["compression"], raw["control"], raw["sites"] = {}, {}, {"here": {}}
    run = resolve_run(raw, where="the run to calibrate with")
    outline = Outline.of(run)
    described = outline.hf_config.to_dict()
    factor = 1
    while outline.parameters > LARGEST and factor <= MOST_NARROWED:
        architecture = {
            "model_type": outline.hf_config.model_type,
            "num_hidden_layers": 2,
            "vocab_size": min(int(described["vocab_size"]), 8192),
        }
        for key in NARROWED:
            if isinstance(described.get(key), int):
                architecture[key] = max(1, described[key] // factor)
        for key in ("head_dim", "tie_word_embeddings"):
            if described.get(key) is not None:
                architecture[key] = described[key]
        raw["model"] = {
            "architecture": architecture,
            "attention": config.model.attention,
            "activation_checkpointing": config.model.activation_checkpointing,
        }
        try:
            run = resolve_run(raw, where="the model to calibrate with")
            outline = Outline.of(run)
        except DilocoxError:
            return small_run()
        factor *= 2
    return run if outline.parameters <= LARGEST else small_run()


def split(one: float, several: float, count: int) -> tuple[float, float]:
    """Seconds of a micro-batch, and of the rest of a step, from steps of one and of `count`.

    What grows with the micro-batches is computation, the rest is the optimizer. Noise may leave
    less than nothing for the rest; then a hundredth is.
    """
    each = min((several - one) / (count - 1), several / count)
    if not each > 0:
        each = one
    return each, max(one - each, one / 100)


def _measure_device(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Operations per second of a real inner step, and what its optimizer reads and writes.

    On a CPU those of one core, by the processor's time, so that other work counts for little. In
    the precision that the run does not have a step of one sequence is timed there: processors that
    cannot multiply bf16 take long for it.
    """
    run = cut_down(config)
    outline = Outline.of(run)
    torch_device = resolve_device(run.site)
    precision = resolve_precision(run.site, torch_device)
    usual = resolve_precision(run.site.model_copy(update={"precision": "auto"}), torch_device)
    shared = torch_device.type == "cpu"
    if shared:
        keep_freed_memory()
    clock = time.process_time if shared else time.perf_counter
    rows = run.site.micro_batch_size

    def timed_step(model: SiteModel, rows: int) -> float:
        length = run.data.sequence_length
        size = (rows, length)
        ids = torch.randint(0, int(outline.hf_config.vocab_size), size, device=torch_device)

        def step() -> None:
            # The result is read, so that a GPU is waited for.
            if not model.inner_step(ids, ids, 1e-4).finite:
                raise TrainingError("calibration: a step of the model was not finite")

        return timed(step, clock)

    progress(f"inner steps of the run's model in {_named(precision)}")
    model = _model(run, outline, torch_device, precision)
    one = timed_step(model, rows)
    each, fixed = split(one, timed_step(model, MICRO_BATCHES * rows), MICRO_BATCHES)
    del model
    again = 2 if run.model.activation_checkpointing else 0
    per_row = (6 + again) * outline.compute * run.data.sequence_length
    rates = {precision: per_row * rows / each / 1e12}
    other = torch.float32 if precision == torch.bfloat16 else torch.bfloat16
    progress(f"an inner step in {_named(other)}")
    fewer = 1 if shared else rows
    site = run.site.model_copy(update={"micro_batch_size": fewer, "batch_size": fewer})
    small = run.model_copy(update={"site": site})
    seconds = timed_step(_model(small, outline, torch_device, other), fewer)
    rates[other] = per_row * fewer / max(seconds - fixed, seconds / 2) / 1e12
    moved = OPTIMIZER_BYTES[run.inner.optimizer] * outline.parameters
    if run.inner.optimizer == "muon":
        # The cost model has its products by themselves, at the rate of the step's.
        products = sum(orthonormalising_flops(shapes) for shapes in outline.shapes)
        fixed = max(fixed - products / (1e12 * rates[precision]), fixed / 100)
    memory = (
        _machine_memory() if shared else torch.cuda.get_device_properties(torch_device).total_memory
    )
    return {
        "bf16_tflops": rates[torch.bfloat16],
        "fp32_tflops": rates[torch.float32],
        "utilisation": 1.0,
        "memory_gib": memory / GIB,
        "memory_gb_s": moved / fixed / 1e9,
        "peer_gb_s": 10.0,
        "shared": shared,
        "cores": float(available_cores()) if shared else 1.0,
        "stepped_parameters": outline.parameters,
        "step_seconds": one,
        "precision": _named(usual),
    }


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _named(precision: torch.dtype) -> str:
    return str(precision).removeprefix("torch.")


def _model(
    run: RunConfig, outline: Outline, device: torch.device, precision: torch.dtype
) -> SiteModel:
    flash = run.model.attention == "flash_attention_2"
    chunk = build_chunk(
        outline.hf_config,
        outline.blueprint.cut[0],
        attention="sdpa" if flash and device.type == "cpu" else run.model.attention,
        activation_checkpointing=run.model.activation_checkpointing,
    )
    source = open_weights(run.model, outline.hf_config, run.run.seed)
    return SiteModel(
        [chunk],
        lambda module, where: materialise(module, source, where),  # type: ignore[arg-type]
        SiteMesh.create(1, 1, device),
        run.site,
        run.inner,
        hidden_size=int(outline.hf_config.hidden_size),
        precision=precision,
        tied=outline.blueprint.tied,
    )
