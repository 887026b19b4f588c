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
import contextlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import dilocox
from benchmarks import common
from benchmarks.plain_loop import PlainLoop, Recipe
from dilocox.config.run_config import RunConfig
from dilocox.data import SequenceSpace, TokenFiles
from dilocox.inner import (
    keep_freed_memory,
    mean_cross_entropy,
    resolve_device,
    resolve_precision,
    set_threads,
)
from dilocox.models import count_parameters, load_model_config
from dilocox.training.launch.data_preparation import prepare_data
from dilocox.utils import processes

TARGET = 0.97
IDLE_LIMIT = {"cpu": 0.01, "cuda": 0.25}
"""Largest share of all cores that the waiting run may use, by the device that trains."""
WARM_UP_TURNS = 1
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


@dataclass(frozen=True)
class Turn:
    """Message of a side that has finished a turn."""

    seconds: float
    peak_bytes: int
    loss: float | None


class Waiting:
    """Lets one side wait for its turns. It reaches the side's process only by a fork."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._began: float | None = None

    def turn_over(self, device: torch.device, loss: float | None = None) -> None:
        """Wait for the device, report the end of the turn, and wait for the next turn."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        seconds = now - self._began if self._began is not None else 0.0
        self._pipe.send(Turn(seconds, peak_bytes(device), loss))
        self._pipe.recv()
        self._began = time.monotonic()


class GatedData:
    """The run's own token ranges, read as the run reads them, with a stop before each turn."""

    def __init__(self, config: RunConfig, waiting: Waiting, turn: int, turns: int) -> None:
        self._config = config
        self._waiting = waiting
        self._turn = turn
        self._last = turn * turns
        self._given = 0
        self._space: SequenceSpace | None = None

    def __call__(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the sequences from `start` to `start + count`, which is not included."""
        if self._space is None:
            self._space = sequence_space(self._config)
        if start != self._given:
            raise RuntimeError(f"sequence {start} was asked for after {self._given}")
        if self._given % self._turn == 0 and self._given <= self._last:
            self._waiting.turn_over(resolve_device(self._config.site))
        self._given += count
        return np.asarray(self._space.read(start, count))


def sequence_space(config: RunConfig) -> SequenceSpace:
    """Return the numbered sequences that the run trains on."""
    files = TokenFiles.open(config.data_folder)
    length = config.data.sequence_length
    return SequenceSpace(files, seed=config.run.seed, sequence_length=length)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM; this benchmark needs Linux")


def run_dilocox(config: RunConfig, data: GatedData, log: Path) -> None:
    """Train the real run. Called in a process of its own."""
    _to_file(log)
    result = dilocox.train(config, dataset=data, loss=mean_cross_entropy)
    sys.exit(0 if result.finished else 1)


def run_plain(config: RunConfig, waiting: Waiting, steps_per_turn: int, turns: int) -> None:
    """Train the plain loop. Called in a process of its own."""
    keep_freed_memory()
    set_threads(config.site.threads, ranks_here=1)
    device = resolve_device(config.site)
    files = TokenFiles.open(config.data_folder)
    loop = PlainLoop(
        load_model_config(config.model, files.vocabulary_size),
        recipe(config),
        device,
        resolve_precision(config.site, device),
        config.model.attention,
        compile_layers=compiles(config, device),
    )
    batch = config.site.batch_size
    steps = steps_per_turn * turns
    sequences = torch.from_numpy(np.asarray(sequence_space(config).read(0, steps * batch)))
    inputs, labels = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
    losses: list[torch.Tensor] = []
    for step in range(steps):
        if step % steps_per_turn == 0:
            waiting.turn_over(device, _mean(losses))
            losses = []
        rows = slice(step * batch, (step + 1) * batch)
        losses.append(loop.step(inputs[rows], labels[rows]))
    waiting.turn_over(device, _mean(losses))


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Return whether the run's layers are compiled. The value "auto" compiles on GPUs."""
    asked: object = config.model.compile
    return device.type == "cuda" if asked == "auto" else bool(asked)


def recipe(config: RunConfig) -> Recipe:
    """Return the settings of the run file's inner optimizer, for the plain loop."""
    inner = config.inner
    return Recipe(
        batch=config.site.batch_size,
        micro_batch=config.site.micro_batch_size,
        learning_rate=inner.learning_rate,
        betas=inner.betas,
        eps=inner.eps,
        weight_decay=inner.weight_decay,
        clip=inner.clip,
        warmup_steps=inner.warmup_steps,
        total_steps=config.total_steps,
        final_fraction=inner.final_fraction,
    )


def _mean(losses: list[torch.Tensor]) -> float | None:
    return float(torch.stack(losses).mean()) if losses else None


def _to_file(log: Path) -> None:
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.close(stream)


@dataclass
class Side:
    """One side as the process that gives out the turns sees it."""

    name: str
    process: BaseProcess
    pipe: Connection
    log: Path | None

    def arrived(self) -> Turn:
        """Wait until the side has finished its turn."""
        ready = wait([self.pipe, self.process.sentinel])
        if self.pipe in ready:
            with contextlib.suppress(EOFError):
                turn: Turn = self.pipe.recv()
                return turn
        self.process.join(1.0)
        said = ""
        if self.log is not None and self.log.exists():
            said = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
        sys.exit(f"{self.name} {processes.why_ended(self.process)}\n{said}")

    def go(self) -> None:
        """Give the side its next turn."""
        self.pipe.send("go")


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process and all of its living descendants."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        total = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += cpu_seconds(int(child))
    return total


@dataclass
class Result:
    """Tokens/s by side, one value per turn in order. The other fields are of the last turn."""

    rates: dict[str, list[float]]
    cpu: dict[str, list[float]]
    """CPU seconds of each turn."""
    peak: dict[str, int]
    idle_share: float
    plain_loss: float | None


def alternate(sides: dict[str, Side], pairs: int, tokens: int) -> Result:
    """Let the sides take turns of `tokens` tokens. The first `WARM_UP_TURNS` do not count."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    peak: dict[str, int] = {}
    loss = None
    idle = plain_seconds = 0.0
    for side in sides.values():
        side.arrived()
    names = list(sides)
    for number in range(WARM_UP_TURNS + pairs):
        for name in names if number % 2 == 0 else names[::-1]:
            before = {each: cpu_seconds(sides[each].process.pid or 0) for each in names}
            sides[name].go()
            turn = sides[name].arrived()
            used = {
                each: cpu_seconds(sides[each].process.pid or 0) - before[each] for each in names
            }
            # A rank resets its peak after each round (dilocox.inner.device_memory).
            peak[name] = max(peak.get(name, 0), turn.peak_bytes)
            loss = turn.loss if turn.loss is not None else loss
            if number < WARM_UP_TURNS:
                continue
            rates[name].append(tokens / turn.seconds)
            cpu[name].append(used[name])
            if name == "plain":
                idle += used["dilocox"]
                plain_seconds += turn.seconds
        if number >= WARM_UP_TURNS:
            common.say(
                f"pair {number - WARM_UP_TURNS + 1}/{pairs}: dilocox "
                f"{rates['dilocox'][-1]:,.0f} tokens/s, plain {rates['plain'][-1]:,.0f}, ratio "
                f"{rates['dilocox'][-1] / rates['plain'][-1]:.3f}, of CPU time "
                f"{cpu['plain'][-1] / cpu['dilocox'][-1]:.3f}"
            )
    cores = len(os.sched_getaffinity(0))
    return Result(rates, cpu, peak, idle / plain_seconds / cores, loss)


def configuration(
    shape: dict[str, Any], root: Path, device: str, rounds: int, compile_: bool | None = None
) -> RunConfig:
    """Return the run file: defaults except for sizes, and no checkpoints during the run.
    `compile_`: value of `model.compile`. None: its default."""
    model = {} if compile_ is None else {"compile": compile_}
    return dilocox.resolve_run(
        {
            "run": {"name": "single-site", "folder": str(root / "run")},
            "model": {"architecture": shape["architecture"], **model},
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
            },
            "inner": {"learning_rate": 1e-3},
            "outer": {"rounds": rounds},
            "checkpoint": {"every_rounds": 0},
            "evaluation": {"completion_tokens": 0},
            "sites": {"here": {}},
        }
    )


def measure(config: RunConfig, root: Path, pairs: int, rounds_per_turn: int) -> Result:
    """Start both sides, let them alternate, and end them."""
    steps = rounds_per_turn * config.outer.inner_steps
    turns = WARM_UP_TURNS + pairs
    tokens = steps * config.site.batch_size * config.data.sequence_length
    sides: dict[str, Side] = {}
    log = root / "run.log"
    try:
        ours, theirs = processes.CONTEXT.Pipe()
        plain = processes.start(run_plain, config, Waiting(theirs), steps, turns, name="plain")
        theirs.close()
        sides["plain"] = Side("plain", plain, ours, None)
        ours, theirs = processes.CONTEXT.Pipe()
        data = GatedData(config, Waiting(theirs), steps * config.site.batch_size, turns)
        run = processes.start(run_dilocox, config, data, log, name="dilocox")
        theirs.close()
        sides["dilocox"] = Side("dilocox", run, ours, log)
        result = alternate(sides, pairs, tokens)
        for side in sides.values():
            side.go()
        run.join(120.0)
        if run.exitcode != 0:
            sys.exit(f"the run did not end well\n{log.read_text(errors='replace')[-2000:]}")
        return result
    finally:
        for side in sides.values():
            side.process.kill()
            side.process.join()


def rows_of(result: Result, dtype: str, device: str) -> list[common.Row]:
    """Return one row per side."""
    ratios = [d / p for d, p in zip(result.rates["dilocox"], result.rates["plain"], strict=True)]
    ratio = common.median_interval(ratios)
    of_cpu = common.median_interval(
        [p / d for d, p in zip(result.cpu["dilocox"], result.cpu["plain"], strict=True)]
    )
    rows = []
    for name in ("plain", "dilocox"):
        rate = common.median_interval(result.rates[name])
        rows.append(
            {
                "implementation": name,
                "tokens_per_second": round(rate.median, 1),
                "tokens_per_second_low": round(rate.low, 1),
                "tokens_per_second_high": round(rate.high, 1),
                "ratio": round(ratio.median, 4) if name == "dilocox" else 1.0,
                "ratio_low": round(ratio.low, 4) if name == "dilocox" else None,
                "ratio_high": round(ratio.high, 4) if name == "dilocox" else None,
                "cpu_ratio": round(of_cpu.median, 4) if name == "dilocox" else 1.0,
                "peak_bytes": result.peak[name],
                "device": device,
                "dtype": dtype,
                "pairs": len(ratios),
            }
        )
    return rows


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    arguments = common.parser(__doc__ or "")
    arguments.add_argument("--pairs", type=int, metavar="N", help="pairs of turns to measure")
    arguments.add_argument("--device", choices=["auto", "cpu"], default="auto")
    arguments.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None,
        help="compile the layers of both sides (default: as the run file's default has it)",
    )  # fmt: skip
    options = arguments.parse_args()
    common.end_on_signals()
    torch.set_num_threads(1)  # this process forks: it starts no thread pool
    on = common.machine()
    gpu = on["gpu"] is not None and options.device == "auto"
    pairs = options.pairs or (10 if options.quick else 100)
    rounds_per_turn = 1
    root = Path(tempfile.mkdtemp(prefix="dilocox-single-site-"))
    try:
        # One more round than is measured: the end of the last turn begins the next one.
        rounds = rounds_per_turn * (WARM_UP_TURNS + pairs) + 1
        shape = LARGE if gpu else SMALL
        config = configuration(shape, root, options.device, rounds, options.compile)
        common.say("preparing token files")
        files = prepare_data(config)
        hf_config = load_model_config(config.model, files.vocabulary_size)
        parameters = count_parameters(hf_config)
        common.say(f"{parameters:,} parameters, {pairs} pairs of turns")
        result = measure(config, root, pairs, rounds_per_turn)
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
        "steps_per_turn": rounds_per_turn * config.outer.inner_steps,
        "method": config.outer.method,
        "codec": config.compression.codec,
        "compiled": compiles(config, torch.device(device)),
        "idle_cpu_share": round(result.idle_share, 5),
        "extra_bytes_per_parameter": round(extra / parameters, 1),
        "plain_loss_last": result.plain_loss,
        "target": TARGET,
    }
    print(
        common.table(
            rows,
            {
                "implementation": "s",
                "tokens_per_second": ",.0f",
                "ratio": ".3f",
                "ratio_low": ".3f",
                "ratio_high": ".3f",
                "cpu_ratio": ".3f",
                "peak_bytes": common.mebibytes,
            },
        )
    )
    met = "reached" if rows[1]["ratio"] >= TARGET else "MISSED"
    print(
        f"ratio {rows[1]['ratio']:.3f}, target {TARGET}: {met}; peak {extra / parameters:+.1f} "
        f"bytes per parameter; the waiting run used {result.idle_share:.2%} of the CPU"
    )
    if options.json:
        common.write_json(options.json, "single_site", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
