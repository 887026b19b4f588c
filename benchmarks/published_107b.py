"""Explains the published speeds of the 107B run with the planner, and plans the run with dilocox.

DiLoCoX (arXiv 2506.21263) trained Qwen1.5-110B cut to 78 layers, on 160 A800-40G at two sites with
1 Gbps between them. Published speeds are 10.4 tokens/s synchronously, 3,728 with DiLoCoX, 1,168
without compression, and 40 % less without overlap. Layout, batch and sequence length are not
published. Three steps:

1. `assumptions`: the synchronous speed fixes the tokens per step for each way of sending gradients
   (bytes per value, one link per site or one per node). DiLoCoX's speed then fixes the time of a
   step, and with the pipeline bubbles the share of the GPUs' peak that the step needs. Shares above
   1 are impossible; training reaches 0.2 to 0.6.
2. `published`: the planner's prediction for each published figure, under the assumptions that agree
   best; with codecs on the GPU, and with codecs on one processor core per rank, as in this engine.
   Batch and utilisation are fitted to two of the figures; the others are predictions.
   `missing_seconds` is the time per round in the published speed that the model does not explain.
3. `today`: the planner's prediction for `examples/qwen1.5-107b.toml`, and for the published batch
   with today's method; both against the compute limit.

Nothing is measured, and nothing runs on a GPU. It takes a minute.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import common
from dilocox.config.run_config import RunConfig, load_run
from dilocox.inner.device_memory import high_water
from dilocox.tools.planner.hardware_table import GpuPlacement, HardwareTable, Host
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.payload_costs import ring_seconds
from dilocox.tools.planner.plan import plan_run
from dilocox.tools.planner.predict import predict
from dilocox.tools.planner.variants import changed, with_method

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen1.5-107b.toml"
SYNCHRONOUS, DILOCOX = 10.4, 3728.0
INNER_STEPS = 125
SITES, NODES, GPUS = 2, 10, 80
SEQUENCES = (512, 1024, 2048, 4096)
BATCH = 9
"""Sequences of 2,048 tokens per step and site: the batch behind 10.4 tokens/s, rounded."""
UTILISATION = 0.54
"""Share of the GPUs' peak with one layer per stage and the head beside the last layer. 80 even
stages would need 0.46."""
ON_GPU = {
    "encode": 1e12,
    "decode": 1e12,
    "lowrank": 4e12,
    "average": 1e12,
    "digest": 1e15,
    "outer": 1e-10,
    "exchange": 0.0,
    "exchange_cpu": 0.0,
    "exchange_thread": 0.0,
}
"""Rates of codecs on a GPU, which take almost no time. The rates of the published system are not
known."""
NO_COPIES = 1e15
"""Bytes per second between GPU and host. Codecs on a GPU copy no values to the host."""
PUBLISHED: tuple[tuple[str, float, str, dict[str, Any]], ...] = (
    ("AllReduce", SYNCHRONOUS, "allreduce", {}),
    ("DiLoCoX", DILOCOX, "dilocox-paper", {}),
    ("DiLoCoX without overlap", 0.6 * DILOCOX, "dilocox-paper",
     {"outer.overlap": "none", "outer.delay": 0}),
    ("DiLoCoX without compression", 1168.0, "dilocox-paper",
     {"compression.codec": "none", "control.adapt": "off"}),
    ("CocktailSGD", 2427.0, "cocktailsgd", {}),
)  # fmt: skip


def assumptions(outline: ModelOutline, place: GpuPlacement, rate: float) -> list[common.Row]:
    """Return tokens per step, step time and utilisation that follow from two published speeds.

    There is one row per assumption. `rate` is the link's rate in bytes per second.
    """
    rows: list[common.Row] = []
    peak = place.device.bf16 * GPUS
    for width in (4, 2):
        for links in (1, NODES):
            # A step takes the seconds of its computation in addition to those of its all-reduce.
            seconds = ring_seconds(width * outline.parameters, SITES, rate * links)
            tokens = SYNCHRONOUS * seconds / (1 - SYNCHRONOUS / DILOCOX)
            step = tokens / DILOCOX
            for length in SEQUENCES:
                count = tokens / SITES / length
                each = outline.flops_per_token * length / peak
                # The run has as many stages as GPUs, and fills the pipeline once per step.
                share = (max(1.0, count) + GPUS - 1) * each / step
                rows.append(
                    {
                        "gradient_bytes": width,
                        "links": "one per site" if links == 1 else "one per node",
                        "sequence_length": length,
                        "allreduce_seconds": seconds,
                        "tokens_per_step": tokens,
                        "step_seconds": step,
                        "micro_batches": count,
                        "utilisation": share,
                        "possible": count >= 1 and share <= 1,
                        "usual": count >= 1 and 0.2 <= share <= 0.6,
                    }
                )
    return rows


def as_published(config: RunConfig) -> RunConfig:
    """Return the run file with one layer per stage and GPU, AdamW and the fitted batch."""
    return changed(
        config,
        {
            "site.stages": 78,
            "site.shards": 1,
            "site.schedule": "gpipe",
            "site.batch_size": BATCH,
            "inner.optimizer": "adamw",
            "model.activation_checkpointing": False,
        },
    )


def published(config: RunConfig, table: HardwareTable) -> list[common.Row]:
    """Return predicted and published speeds, under the assumptions that agree best."""
    run = as_published(config)
    outline = ModelOutline.of(run)
    place, link = table.place("a800-40g:8x10", UTILISATION), table.link("paper")
    rows: list[common.Row] = []
    for name, speed, method, values in PUBLISHED:
        variant = with_method(run, method, int(outline.hf_config.hidden_size))
        variant = changed(variant, values) if values else variant
        fast = replace(place.device, host=fast_host(place.device.host), pcie_rate=NO_COPIES)
        free = replace(place, device=fast)
        found = predict(variant, free, link, SITES, outline=outline)
        engine = predict(variant, place, link, SITES, outline=outline)
        exposed = found.tokens_per_step * found.choice.inner_steps / speed - found.round_seconds
        rows.append(
            {
                "run": name,
                "published": speed,
                "predicted": found.tokens_per_second,
                "ratio": found.tokens_per_second / speed,
                "engine": engine.tokens_per_second,
                "exchange_seconds": found.exchange_seconds,
                "round_seconds": found.round_seconds,
                "missing_seconds": exposed,
                "engine_work_seconds": engine.work_seconds,
                "payload_gb": found.payload_bytes / 1e9,
                "fitted": name in ("AllReduce", "DiLoCoX"),
            }
        )
    return rows


def fast_host(host: Host) -> Host:
    """Return `host` with codecs that take almost no time."""
    rates = {
        name: dict.fromkeys(getattr(host, name), value) if name in ("encode", "decode") else value
        for name, value in ON_GPU.items()
    }
    return replace(host, **rates)  # type: ignore[arg-type]


def today(config: RunConfig, table: HardwareTable) -> list[common.Row]:
    """Return plans of today's method, at the published batch and for the example run file."""
    rows: list[common.Row] = []
    link = table.link("paper")
    place = table.place("a800-40g:8x10")
    for name, run in (
        ("published batch", with_method(as_published(config), "dilocox", 8192)),
        ("the example", config),
    ):
        plan = plan_run(run, [place] * SITES, [link] * SITES, table.fabric(None), methods=())
        choice = plan.prediction.choice
        limit = plan.limit
        rows.append(
            {
                "plan": name,
                "tokens_per_step": plan.prediction.tokens_per_step,
                "tokens_per_second": plan.prediction.tokens_per_second,
                "share_of_no_network": plan.prediction.share,
                "inner_steps": choice.inner_steps,
                "codec": choice.codec,
                "delay": choice.delay,
                "slots": choice.slots,
                "bubble_share": plan.step.bubble / plan.step.seconds,
                "limit": limit,
                "of_limit": plan.prediction.tokens_per_second / limit,
                "published_of_limit": DILOCOX / limit,
                "over_published_allreduce": plan.prediction.tokens_per_second / SYNCHRONOUS,
                "fits": plan.fits,
                "needed_gib": plan.needed / 2**30,
                "available_gib": plan.available / 2**30,
            }
        )
    return rows


def main() -> int:
    """Compute the rows, print and write them. Returns the exit code."""
    options = common.parser(__doc__ or "", quick=False).parse_args()
    on = common.machine()
    table, config = HardwareTable.load(), load_run(EXAMPLE)
    place = table.place("a800-40g:8x10")
    common.say("the model's shape")
    tried = assumptions(ModelOutline.of(config), place, table.link("paper").rate)
    common.say("the published figures")
    known = published(config, table)
    common.say("today's plans")
    now = today(config, table)
    flag: Callable[[Any], str] = lambda value: "yes" if value else "no"  # noqa: E731
    print(common.table(tried, {
        "gradient_bytes": "d", "links": "s", "sequence_length": ",d", "allreduce_seconds": ",.0f",
        "tokens_per_step": ",.0f", "step_seconds": ".2f", "micro_batches": ".1f",
        "utilisation": ".2f", "possible": flag, "usual": flag,
    }), end="\n\n")  # fmt: skip
    print(common.table(known, {
        "run": "s", "published": ",.1f", "predicted": ",.1f", "ratio": ".2f", "engine": ",.1f",
        "exchange_seconds": ",.0f", "round_seconds": ",.0f", "missing_seconds": "+,.0f",
        "payload_gb": ".1f", "fitted": flag,
    }), end="\n\n")  # fmt: skip
    print(common.table(now, {
        "plan": "s", "tokens_per_step": ",d", "tokens_per_second": ",.0f",
        "share_of_no_network": ".1%", "inner_steps": "d", "codec": "s", "bubble_share": ".0%",
        "limit": ",.0f", "of_limit": ".1%", "over_published_allreduce": ",.0f", "fits": flag,
    }))  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Not ru_maxrss, which also counts the process that has started this one.
    peak = high_water(Path("/proc/self/status").read_text(encoding="ascii")) or 0
    common.say(f"{used.ru_utime + used.ru_stime:.0f} s, {peak / 2**30:.2f} GiB")
    if options.json:
        rows = [
            {"part": part, **row}
            for part, rows in (("assumptions", tried), ("published", known), ("today", now))
            for row in rows
        ]
        settings = {"batch": BATCH, "utilisation": UTILISATION, "example": EXAMPLE.name}
        common.write_json(options.json, "published_107b", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
