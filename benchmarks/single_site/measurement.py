"""Lets the two sides take turns, and computes the rows of the result."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks import common
from benchmarks.single_site.sides import (
    GatedData,
    Turn,
    Waiting,
    run_dilocox,
    run_loop,
    run_plain,
)
from dilocox.config.run_config import RunConfig
from dilocox.utils import processes

WARM_UP_TURNS = 1


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
            before = {each: common.cpu_seconds(sides[each].process.pid or 0) for each in names}
            sides[name].go()
            turn = sides[name].arrived()
            used = {
                each: common.cpu_seconds(sides[each].process.pid or 0) - before[each]
                for each in names
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


def measure(
    config: RunConfig, root: Path, pairs: int, rounds_per_turn: int, own_loop: Path | None = None
) -> Result:
    """Start both sides, let them alternate, and end them.

    `own_loop`: run file of `config` if the run is a loop of its own, else None.
    """
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
        waiting = Waiting(theirs)
        if own_loop is not None:
            run = processes.start(run_loop, config, own_loop, waiting, steps, log, name="dilocox")
        else:
            data = GatedData(config, waiting, steps * config.site.batch_size, turns)
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
