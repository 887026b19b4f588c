"""One row of the quality benchmark: its run file, a real run with all sites, and its result."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dilocox
from benchmarks.common import commit
from benchmarks.quality.data import Text
from benchmarks.quality.jobs import Job
from benchmarks.quality.rows import BATCH, MODEL, REGIMES, uplink
from dilocox.config.run_config import RunConfig
from dilocox.errors import DilocoxError
from dilocox.models import count_parameters, load_model_config

Row = dict[str, Any]
NOT_FINITE = "not finite"
"""Part of the message of a run that has diverged, which is a result and no failure."""

PATIENT = {"heartbeat": 120.0, "link_timeout": 600.0}
"""Long time-outs: sites share two cores, and none may count as lost on a busy machine."""


def run_file(
    name: str, architecture: Mapping[str, Any], method: str, text: Text, folder: Path,
    seed: int, sites: int, same_text: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the part of a run file that does not depend on lengths and rates.

    Args:
        name: name of the run.
        architecture: the section `[model.architecture]`.
        method: `outer.method`.
        text: the text, with token files.
        folder: the run's folder.
        seed: seed of the run and of the text.
        sites: number of sites.
        same_text: all sites train on the whole text; False: each on its own parts.
    """
    share = BATCH // sites
    return {
        "run": {"name": name, "folder": str(folder), "seed": seed},
        "model": {"architecture": dict(architecture)},
        "data": {**text.section(), "folder": str(text.mixture(seed))},
        "site": {
            "batch_size": share,
            "micro_batch_size": share,
            "threads": 1,
            "device": "cpu",
            "precision": "fp32",
        },
        "inner": {},
        "outer": {"method": method},
        # Rows are compared at the same number of tokens, also on a busy machine.
        "control": {"steps": "equal"},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "network": PATIENT,
        "sites": {
            f"site-{number}": {} if same_text else {"data": str(text.site(seed, number, sites))}
            for number in range(sites)
        },
    }


def set_keys(raw: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set keys of a run file, written as `section.key`."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value


def configuration(job: Job, text: Text, folder: Path, steps: int | None = None) -> RunConfig:
    """Return the run file of `job` in `folder`.

    `steps` replaces the number of steps of the regime. Raises `ConfigError`.
    """
    regime, entry = REGIMES[job.regime], job.entry
    raw = run_file(
        "quality", MODEL, entry.method, text, folder, job.seed, job.sites, job.iid
    )  # fmt: skip
    raw["inner"]["warmup_steps"] = regime.warmup_steps
    raw["outer"]["steps"] = steps or regime.steps
    set_keys(raw, job.settings)
    if entry.target is not None:
        size = parameters(dilocox.resolve_run(raw))
        raw["control"]["link"] = uplink(entry.target, job.sites, size)
    return dilocox.resolve_run(raw)


def parameters(config: RunConfig) -> int:
    """Return the number of parameters of the run's model; tied ones count once."""
    vocabulary = config.data.vocabulary_size
    return int(count_parameters(load_model_config(config.model, vocabulary)))


def train(job: Job, config: RunConfig, log: Path, keep: bool) -> Row | None:
    """Train a run and return its row. Its output goes to `log`.

    A run that diverged has no `val_loss`, and the reason in `failed`. Returns None if an interrupt
    stopped the run. The run folder is removed unless `keep`. Raises `DilocoxError` for other
    failures.
    """
    began, cpu = time.monotonic(), cpu_seconds()
    finished, failed = run_once(config, log)
    if not finished:
        return None
    row = {
        **job.key,
        **described(job, config),
        **measured(config, job.sites, failed),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),
    }
    if not keep:
        shutil.rmtree(config.folder, ignore_errors=True)
    return row


def measured(config: RunConfig, sites: int, failed: str | None) -> Row:
    """Return the fields of a row that are read from the folder of a run that has ended.

    `failed`: why the run diverged; then there is no `val_loss`. None: it did not.

    Raises `DilocoxError` if a site was absent in a round.
    """
    records = read_records(config.folder / "metrics.jsonl")
    check_attendance(records, sites)
    row = {
        **measures(read_summary(config), records),
        **most_rounds([] if config.exchanges_gradients else records),
        "commit": commit(),
        "failed": failed,
    }
    return row if failed is None else {**row, "val_loss": None}


def run_once(config: RunConfig, log: Path) -> tuple[bool, str | None]:
    """Train a run with its output in `log`. Return whether it ended, and why if it diverged.

    A run that an interrupt stopped has not ended. Raises `DilocoxError` for other failures.
    """
    try:
        with log.open("w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
            return dilocox.train(config, overwrite=True).finished, None
    except DilocoxError as error:
        if NOT_FINITE not in str(error):
            raise
        return True, str(error)


def check_attendance(records: list[Row], sites: int) -> None:
    """Raise `DilocoxError` if a site was absent in a round: its loss is not the method's."""
    for record in records:
        if record.get("kind") == "round" and not record.get("site") and record["sites"] != sites:
            raise DilocoxError(
                f"round {record['round']} had {record['sites']} of {sites} sites: this machine was "
                "too busy; call again"
            )


def cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_records(path: Path) -> list[Row]:
    """Return the records of a run's metrics."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_summary(config: RunConfig) -> Row:
    """Return the summary of a run that has ended."""
    found: Row = json.loads((config.folder / "summary.json").read_text(encoding="utf-8"))
    return found


def described(job: Job, config: RunConfig) -> Row:
    """Return the fields of a row that are known before the run."""
    return {
        "method": job.entry.method,
        "group": job.entry.group,
        "steps": config.total_steps,
        "published_inner_steps": job.entry.published_inner_steps,
        "optimizer": config.inner.optimizer,
        "learning_rate": config.inner.learning_rate,
        "target": job.entry.target,
        "link": config.control.link,
        "settings": job.settings_text,
    }


def measures(summary: Mapping[str, Any], records: list[Row]) -> Row:
    """Return the fields of a row that are known after the run: loss, tokens and reductions.

    The reduction per transfer is over all rounds, against fp32 vectors exchanged in the same way.
    The reduction in all is against the bytes of synchronous training, and includes the flush.
    `inner_steps` (a mean) and `plans` are the real ones of the rounds. `dropped` counts
    contributions of a site to a round that were not finite.
    """
    rounds = [r for r in records if r.get("kind") == "round" and r.get("site")]
    whole = [r for r in records if r.get("kind") == "round" and not r.get("site")]
    flush = sum(r["payload_bytes"] for r in records if r.get("kind") == "flush")
    payload = sum(r["payload_bytes"] for r in rounds)
    dense = sum(r["ratio_per_transfer"] * r["payload_bytes"] for r in rounds)
    everything = summary["payload_bytes"]
    lengths = [r["steps"] for r in rounds if r["steps"]]
    return {
        "val_loss": summary["val_loss_last"],
        "reduction_per_transfer": dense / payload if payload else None,
        "reduction_total": summary["ratio_per_token"] if everything else None,
        "flush_share": flush / everything if everything else None,
        "tokens": summary["tokens"],
        "rounds": len(whole),
        "inner_steps": sum(lengths) / len(lengths) if lengths else None,
        "dropped": sum("dropped" in r for r in rounds),
        "plans": plans([r for r in records if r.get("kind") == "plan"], len(whole)),
    }


def most_rounds(records: list[Row]) -> Row:
    """Return the outer learning rate, momentum and number of fragments of most rounds.

    The values may come from the run file or the controller. They are None without a plan.
    """
    changes = [r for r in records if r.get("kind") == "plan"]
    whole = [r for r in records if r.get("kind") == "round" and not r.get("site")]
    counts: dict[tuple[float, float, int], int] = {}
    for plan, held in _held(changes, len(whole)):
        had = plan["learning_rate"], plan["momentum"], plan["fragments"]
        counts[had] = counts.get(had, 0) + held
    rate, momentum, fragments = max(counts, key=lambda had: counts[had], default=(None, None, None))
    return {"outer_learning_rate": rate, "outer_momentum": momentum, "fragments": fragments}


def plans(changes: list[Row], rounds: int) -> str | None:
    """Return codec and inner steps of the rounds, each with its number of rounds, by first use.

    `changes` are the records of plans; each holds until the next one. None without a plan.
    """
    counts: dict[str, int] = {}
    for plan, held in _held(changes, rounds):
        name = f"{plan['codec']} H={plan['inner_steps']}"
        counts[name] = counts.get(name, 0) + held
    return ", ".join(f"{name} x{count}" for name, count in counts.items()) or None


def _held(changes: list[Row], rounds: int) -> list[tuple[Row, int]]:
    """Return the records of plans, each with the number of rounds until the next record."""
    ends = [plan["round"] for plan in changes[1:]] + [rounds]
    return [(plan, end - plan["round"]) for plan, end in zip(changes, ends, strict=False)]
