"""One run of the time to a loss: its run file, the run itself, and its row."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dilocox
from benchmarks.common import today
from benchmarks.quality.data import Text
from benchmarks.quality.rows import MODEL
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
from benchmarks.time_to_loss.cases import BATCH, EVALUATE, HELD_OUT, SITES, WARMUP, Case, Chosen
from dilocox.config.run_config import RunConfig
from dilocox.errors import DilocoxError
from dilocox.tools.testbed import Lab
from dilocox.tools.testbed.run import Run, check, finish, in_lab

Record = dict[str, Any]
START, RUNNING = "message", "running"
"""Kind and text of the record with which training begins."""
LINK_TIMEOUT = 1800.0
"""Link time-out in seconds, as in the WAN benchmark."""


def configuration(
    case: Case, method: str, chosen: Chosen, settings: dict[str, Any], text: Text, folder: Path
) -> RunConfig:
    """Return the run file of `case`, with its run folder below `folder`.

    Raises `ConfigError`.
    """
    raw = run_file("time-to-loss", MODEL, method, text, folder / "run", case.seed, len(SITES),
                   same_text=False)  # fmt: skip
    raw["data"]["validation_sequences"] = HELD_OUT
    share = BATCH // len(SITES)
    raw["site"].update(batch_size=share, micro_batch_size=share)
    raw["inner"].update(learning_rate=case.rate, warmup_steps=WARMUP)
    raw["outer"]["steps"] = case.steps
    raw["network"] = {**raw["network"], "link_timeout": LINK_TIMEOUT}
    set_keys(raw, {**chosen.outer, **settings})
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


Curve = list[tuple[float, int, float]]
"""(seconds since training began, inner steps, held-out loss) of each evaluation, in order."""


def curve(records: Sequence[Record]) -> Curve:
    """Return the evaluations of a run. Raises `DilocoxError` if training never began."""
    began = [
        record["time"]
        for record in records
        if (record["kind"], record.get("text")) == (START, RUNNING)
    ]
    if not began:
        raise DilocoxError("the run's metrics do not say when training began")
    return [
        (record["time"] - began[0], int(record["step"]), float(record["val_loss"]))
        for record in records
        if record["kind"] == "evaluation"
    ]


def written(points: Curve) -> str:
    """Return a curve as text: `seconds/step/loss`, separated by spaces."""
    return " ".join(f"{seconds:.2f}/{step}/{loss:.8f}" for seconds, step, loss in points)


def read(text: str) -> Curve:
    """Return the curve that `written` has written."""
    points = (word.split("/") for word in text.split())
    return [(float(seconds), int(step), float(loss)) for seconds, step, loss in points]
