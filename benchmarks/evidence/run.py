"""One run of the evidence benchmark: its run file and its row."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dilocox
from benchmarks.common import commit
from benchmarks.evidence.cells import WARMUP, Cell
from benchmarks.quality.data import Text
from benchmarks.quality.rows import BATCH, Entry, Settings, uplink
from benchmarks.quality.run import (
    PATIENT,
    Row,
    check_attendance,
    cpu_seconds,
    measures,
    most_rounds,
    parameters,
    read_records,
    run_once,
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
    cell = run.cell
    share = BATCH // cell.sites
    raw: dict[str, Any] = {
        "run": {"name": "evidence", "folder": str(folder), "seed": run.seed},
        "model": {"architecture": cell.architecture},
        "data": {**text.section(), "folder": str(text.mixture(run.seed))},
        "site": {
            "batch_size": share,
            "micro_batch_size": share,
            "threads": 1,
            "device": "cpu",
            "precision": "fp32",
        },
        "inner": {"learning_rate": run.rate},
        "outer": {"method": run.entry.method, "steps": 1},
        # Rows are compared at the same number of tokens, also on a busy machine.
        "control": {"steps": "equal"},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "network": PATIENT,
        "sites": {
            f"site-{number}": {}
            if cell.same_text
            else {"data": str(text.site(run.seed, number, cell.sites))}
            for number in range(cell.sites)
        },
    }
    for key, value in {**run.outer, **run.entry.settings}.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
    size = parameters(dilocox.resolve_run(raw))
    length = steps or cell.steps(size)
    raw["outer"]["steps"] = length
    raw["inner"]["warmup_steps"] = max(1, length // WARMUP)
    if run.entry.target is not None:
        raw.setdefault("control", {})["link"] = uplink(run.entry.target, cell.sites, size)
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
    records = read_records(config.folder / "metrics.jsonl")
    summary = json.loads((config.folder / "summary.json").read_text(encoding="utf-8"))
    check_attendance(records, run.cell.sites)
    row = {
        **run.key,
        "method": run.entry.method,
        "parameters": parameters(config),
        "steps": config.total_steps,
        "target": run.entry.target,
        "link": config.control.link,
        **measures(summary, records),
        **most_rounds([] if config.exchanges_gradients else records),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),
        "commit": commit(),
        "failed": failed,
    }
    if failed is not None:
        row["val_loss"] = None
    shutil.rmtree(config.folder, ignore_errors=True)
    return row
