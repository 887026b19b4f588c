"""Measures the overhead of dilocox without a network: one site, one stage, against a plain loop.

Two processes train the same model on the same batches in the same dtype with the same number of
threads. They take turns: while one computes, the other waits (A B, B A, ...). Each turn is a whole
number of rounds.

- dilocox: a real run of one site, started by `dilocox.train` with its defaults (method `dilocox`,
  compressed exchange in its worker thread, outer steps, coordinator process over TLS, beats,
  reports, metrics). Only the waiting is added: the `dataset` for the Python API blocks at the
  first batch of a turn until the turn begins. The time of a turn runs from there to the first
  batch of the next turn. It includes everything in between: reading batches, inner steps,
  boundaries, landings, the end of the round and its report. Checkpoints are switched off, because
  the plain loop writes none.
  With --own-loop the run is the plain loop inside of `dilocox.site` instead, in one process with
  the run's threads, beside a coordinator process. It waits at the first batch of a turn.
- plain: `benchmarks.plain_loop`, which imports nothing of dilocox; its batches lie in memory.

Both are forked from one parent (the same libraries are loaded) and keep freed memory in the C
library. The CPU use of the waiting run (its beats) is measured and shown. If it is above 1 %,
nothing is reported. With a GPU the limit is a quarter of the cores, since the plain loop needs only
one core there. The layers of both sides are compiled or of neither, by the run file's
`model.compile` (`--compile`). The ratio is the median over pairs of neighbouring turns. So a slow
machine or a drifting clock affects both sides of a pair. The interval is a bootstrap over pairs.
`cpu_ratio` is the same ratio of CPU seconds, over all processes and threads of a side. It
does not include waiting, but it is not affected by other work on the machine either.
Peak memory is the high-water mark of the process that computes: resident memory on a CPU,
`torch.cuda.max_memory_allocated` on a GPU. On a GPU a larger model is trained.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dilocox
from benchmarks import common
from benchmarks.single_site.measurement import WARM_UP_TURNS, measure, rows_of
from benchmarks.single_site.sides import compiles
from dilocox.inner import resolve_precision
from dilocox.models import count_parameters, load_model_config
from dilocox.training.launch.data_preparation import prepare_data

TARGET = 0.97
IDLE_LIMIT = {"cpu": 0.01, "cuda": 0.25}
"""Largest share of all cores that the waiting run may use, by the device that trains."""
ROUNDS_PER_TURN = 1
COLUMNS: dict[str, Callable[[Any], str] | str] = {
    "implementation": "s",
    "tokens_per_second": ",.0f",
    "ratio": ".3f",
    "ratio_low": ".3f",
    "ratio_high": ".3f",
    "cpu_ratio": ".3f",
    "peak_bytes": common.mebibytes,
}
SMALL = {
    "architecture": {
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "sequence_length": 256,
    "batch_size": 8,
    "micro_batch_size": 4,
}
LARGE = {
    "architecture": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "vocab_size": 32768,
        "tie_word_embeddings": True,
    },
    "sequence_length": 1024,
    "batch_size": 32,
    "micro_batch_size": 8,
}


def content(
    shape: dict[str, Any],
    root: Path,
    device: str,
    rounds: int,
    compile_: bool | None = None,
    own_loop: bool = False,
    inner_steps: int | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Return the run file: defaults except for sizes, and no checkpoints during the run.

    `compile_`: value of `model.compile`. None: its default. `own_loop`: whether the site has a loop
    of its own. `inner_steps`: inner steps of a round. `threads`: of both sides
    for training. None: the defaults.
    """
    return {
        "run": {"name": "single-site", "folder": str(root / "run")},
        "model": {"architecture": shape["architecture"], **_given("compile", compile_)},
        "data": {
            "source": "python-stdlib",
            "folder": str(root / "data"),
            "sequence_length": shape["sequence_length"],
            "max_documents": 400,
            "validation_sequences": 8,
        },
        "site": {
            "batch_size": shape["batch_size"],
            "micro_batch_size": shape["micro_batch_size"],
            "device": device,
            **_given("threads", threads),
        },
        "inner": {"learning_rate": 1e-3} | ({"optimizer": "sgd"} if own_loop else {}),
        "outer": {"rounds": rounds, **_given("inner_steps", inner_steps)},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "sites": {"here": {"own_code": True} if own_loop else {}},
    }


def _given(key: str, value: Any) -> dict[str, Any]:
    """Return a key of a run file; nothing if the value is None, so that the default holds."""
    return {} if value is None else {key: value}


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = _options()
    common.end_on_signals()
    torch.set_num_threads(1)  # this process forks: it starts no thread pool
    on = common.machine()
    gpu = on["gpu"] is not None and options.device == "auto"
    pairs = options.pairs or (10 if options.quick else 100)
    own = options.own_loop
    root = Path(tempfile.mkdtemp(prefix="dilocox-single-site-"))
    try:
        # One more round than is measured: the end of the last turn begins the next one.
        rounds = ROUNDS_PER_TURN * (WARM_UP_TURNS + pairs) + 1
        shape = LARGE if gpu else SMALL
        asked = content(
            shape, root, options.device, rounds, options.compile, own, options.inner_steps,
            options.threads,
        )  # fmt: skip
        file, config = common.write_run_file(root, "run", asked), dilocox.resolve_run(asked)
        common.say("preparing token files")
        files = prepare_data(config)
        hf_config = load_model_config(config.model, files.vocabulary_size)
        parameters = count_parameters(hf_config)
        common.say(f"{parameters:,} parameters, {pairs} pairs of turns")
        result = measure(config, root, pairs, ROUNDS_PER_TURN, file if own else None)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    device = "cuda" if gpu else "cpu"
    if result.idle_share > IDLE_LIMIT[device]:
        sys.exit(
            f"the waiting run used {result.idle_share:.1%} of the CPU during the plain loop's "
            "turns: nothing can be said about either"
        )
    dtype = "bf16"
    if not gpu and resolve_precision(config.site, torch.device("cpu")) is torch.float32:
        dtype = "fp32"
    rows = rows_of(result, dtype, device)
    extra = rows[1]["peak_bytes"] - rows[0]["peak_bytes"]
    settings = {
        "parameters": parameters,
        "batch_size": config.site.batch_size,
        "micro_batch_size": config.site.micro_batch_size,
        "sequence_length": config.data.sequence_length,
        "inner_steps": config.outer.inner_steps,
        "threads": config.site.threads,
        "steps_per_turn": ROUNDS_PER_TURN * config.outer.inner_steps,
        "own_loop": own,
        "method": config.outer.method,
        "codec": config.compression.codec,
        "compiled": compiles(config, torch.device(device)),
        "idle_cpu_share": round(result.idle_share, 5),
        "extra_bytes_per_parameter": round(extra / parameters, 1),
        "plain_loss_last": result.plain_loss,
        "target": TARGET,
    }
    print(common.table(rows, COLUMNS))
    met = "reached" if rows[1]["ratio"] >= TARGET else "MISSED"
    print(
        f"ratio {rows[1]['ratio']:.3f}, target {TARGET}: {met}; peak {extra / parameters:+.1f} "
        f"bytes per parameter; the waiting run used {result.idle_share:.2%} of the CPU"
    )
    if options.json:
        common.write_json(options.json, "single_site", on, settings, rows)
    return 0


def _options() -> argparse.Namespace:
    arguments = common.parser(__doc__ or "")
    arguments.add_argument("--pairs", type=int, metavar="N", help="pairs of turns to measure")
    arguments.add_argument("--device", choices=["auto", "cpu"], default="auto")
    arguments.add_argument(
        "--inner-steps", type=int, metavar="N", help="inner steps of a round, which is a turn"
    )
    arguments.add_argument(
        "--threads", type=int, metavar="N",
        help="threads that train, on both sides (default: as many as cores)",
    )  # fmt: skip
    arguments.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None,
        help="compile the layers of both sides (default: as the run file's default has it)",
    )  # fmt: skip
    arguments.add_argument(
        "--own-loop", action="store_true", help="the run is the plain loop inside dilocox.site"
    )
    return arguments.parse_args()
