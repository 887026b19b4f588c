"""One run of the time to a loss: its run file, the run itself, and its row."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import dilocox
from benchmarks.common import today
from benchmarks.quality.data import Text
from benchmarks.quality.rows import MODEL, Entry, Settings
from benchmarks.quality.run import (
    Row,
    cpu_seconds,
    measured,
    parameters,
    read_records,
    run_file,
    run_once,
    set_keys,
)
from benchmarks.quality.tuning import Rates
from benchmarks.time_to_loss.cases import BATCH, EVALUATE, HELD_OUT, SITES, WARMUP, Case
from benchmarks.time_to_loss.curve import Record, curve, written
from benchmarks.wan.run import LINK_TIMEOUT
from dilocox.config.run_config import RunConfig
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.run import Run, check, finish, in_lab


def configuration(
    case: Case,
    entry: Entry,
    rates: Rates,
    declared: Settings,
    text: Text,
    folder: Path,
    steps: int | None = None,
) -> RunConfig:
    """Return the run file of `case`, with its run folder below `folder`.

    `rates`: those of the quality benchmark, of which the outer ones count. `declared`: more keys of
    the run file. `steps` replaces the number of steps of the case. Raises `ConfigError`.
    """
    raw = run_file("time-to-loss", MODEL, entry.method, text, folder / "run", case.seed, len(SITES),
                   same_text=False)  # fmt: skip
    share = BATCH // len(SITES)
    raw["data"]["validation_sequences"] = HELD_OUT
    raw["site"].update(batch_size=share, micro_batch_size=share)
    raw["inner"]["warmup_steps"] = WARMUP
    raw["outer"]["steps"] = steps or case.steps
    raw["network"] = {**raw["network"], "link_timeout": LINK_TIMEOUT}
    set_keys(raw, {**rates.settings, "inner.learning_rate": case.rate})
    set_keys(raw, {**entry.settings, **declared})
    interval = dilocox.resolve_run(raw).outer.inner_steps
    raw["evaluation"]["every_rounds"] = max(1, round(EVALUATE / interval))
    return dilocox.resolve_run(raw)


def train_plain(case: Case, config: RunConfig, log: Path) -> Row | None:
    """Train on this machine, without a lab. Returns the row; None if an interrupt stopped the run.

    A run that diverged has no `val_loss`, and the reason in `failed`. Raises `DilocoxError` for
    other failures.
    """
    cpu = cpu_seconds()
    finished, failed = run_once(config, log)
    return row_of(case, config, failed, cpu_seconds() - cpu) if finished else None


def train_in_lab(case: Case, config: RunConfig, lab: Lab, limit: float) -> Row:
    """Train in the lab, over its links as they are now, and return the row.

    `limit`: seconds after which the run is given up. Raises `LabError` and `DilocoxError`.
    """
    cpu = cpu_seconds()
    config = in_lab(lab, config)
    check(config)
    checked = lab.verify()
    finish(lab, [Run(lab, config, overwrite=True)], limit=limit)
    rates = [link.bits_per_second for link in checked.links]
    unlimited = lab.links.line(SITES[0]).up is None
    row = row_of(case, config, None, cpu_seconds() - cpu)
    return {**row, "link_bits_per_second": None if unlimited else round(statistics.fmean(rates))}


def row_of(case: Case, config: RunConfig, failed: str | None, cpu: float) -> Row:
    """Return the row of a run that has ended, and remove its folder.

    `failed`: why the run diverged. `cpu`: its seconds of processor time.
    """
    records = read_records(config.folder / "metrics.jsonl")
    payload = _by_site(records, "payload_bytes")
    waits = _by_site(records, "wait_seconds")
    points = curve(records)
    row = {
        **case.key,
        "method": config.outer.method,
        "parameters": parameters(config),
        "steps": config.total_steps,
        "overlaps": config.outer.overlap != "none",
        **measured(config, len(SITES), failed),
        "curve": written(points),
        "seconds": round(points[-1][0], 2) if points else None,
        "wait_seconds": round(min(waits), 2),
        "payload_bytes": round(statistics.fmean(payload)),
        "cpu_seconds": round(cpu, 1),
        "date": today(),
    }
    shutil.rmtree(config.folder, ignore_errors=True)
    return row


def _by_site(records: Sequence[Record], field: str) -> list[float]:
    """Return the sum of a field over the rounds and the flush of each site."""
    found = dict.fromkeys(SITES, 0.0)
    for record in records:
        if record["kind"] in ("round", "flush") and record.get("site"):
            found[record["site"]] += record[field]
    return list(found.values())
