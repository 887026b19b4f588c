"""One run of the evidence benchmark: its run file and its row."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dilocox
from benchmarks.evidence.cells import WARMUP, Cell
from benchmarks.quality.data import Text
from benchmarks.quality.rows import Entry, Settings, uplink
from benchmarks.quality.run import (
    Row,
    cpu_seconds,
    measured,
    parameters,
    run_file,
    run_once,
    set_keys,
)
from dilocox.config.run_config import RunConfig


@dataclass(frozen=True)
class Run:
    """A method in a cell, with its seed and learning rates."""

    cell: Cell
    entry: Entry
    seed: int
    rate: float
    outer: Settings

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify the row."""
        named = {"label": self.entry.label, "seed": self.seed, "learning_rate": self.rate}
        return {**self.cell.key, **named}

    def __str__(self) -> str:
        return f"{self.entry.label}, {self.cell}, seed {self.seed}, rate {self.rate:g}"


def configuration(run: Run, text: Text, folder: Path, steps: int | None = None) -> RunConfig:
    """Return the run file of `run` in `folder`.

    `steps` replaces the cell's number of steps. Raises `ConfigError`.
    """
    cell, entry = run.cell, run.entry
    raw = run_file(
        "evidence", cell.architecture, entry.method, text, folder, run.seed, cell.sites,
        cell.same_text,
    )  # fmt: skip
    raw["inner"]["learning_rate"] = run.rate
    raw["outer"]["steps"] = 1
    set_keys(raw, {**run.outer, **entry.settings})
    size = parameters(dilocox.resolve_run(raw))
    length = steps or cell.steps(size)
    raw["outer"]["steps"] = length
    raw["inner"]["warmup_steps"] = max(1, length // WARMUP)
    if entry.target is not None:
        raw["control"]["link"] = uplink(entry.target, cell.sites, size)
    return dilocox.resolve_run(raw)


def train(run: Run, config: RunConfig, log: Path) -> Row | None:
    """Train and return the row. The output of the run goes to `log`.

    A run that diverged has no `val_loss`, and the reason in `failed`. Returns None if an interrupt
    stopped the run. The run folder is removed. Raises `DilocoxError` for other failures.
    """
    began, cpu = time.monotonic(), cpu_seconds()
    finished, failed = run_once(config, log)
    if not finished:
        return None
    row = {
        **run.key,
        "method": run.entry.method,
        "parameters": parameters(config),
        "steps": config.total_steps,
        "target": run.entry.target,
        "link": config.control.link,
        **measured(config, run.cell.sites, failed),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),
    }
    shutil.rmtree(config.folder, ignore_errors=True)
    return row
