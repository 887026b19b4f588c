"""One row of the fine-tuning benchmark: its run file, a real run with all sites, and its result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dilocox
from benchmarks.finetune.chats import Chat
from benchmarks.finetune.choice import accuracy
from benchmarks.finetune.data import Conversations
from benchmarks.finetune.rows import ADAPTER, BATCH, WARMUP_STEPS, Job
from benchmarks.quality.run import PATIENT, measured, read_summary, run_once, set_keys
from dilocox.config.run_config import RunConfig
from dilocox.utils import processes

Row = dict[str, Any]


def configuration(
    job: Job, data: Conversations, folder: Path, parameters: dict[str, int]
) -> RunConfig:
    """Return the run file of `job` in `folder`.

    `parameters`: number of trained parameters by mode. Raises `ConfigError`.
    """
    share = BATCH // job.sites
    raw: dict[str, Any] = {
        "run": {"name": "finetune", "folder": str(folder), "seed": job.seed},
        "model": {"path": str(data.tokenizer), "pretrained": True},
        "data": {**data.section(), "folder": str(data.tokens(job.seed))},
        "site": {
            "batch_size": share,
            "micro_batch_size": 1,
            "threads": 1,
            "device": "cpu",
            "precision": job.precision,
        },
        "inner": {"warmup_steps": WARMUP_STEPS, "learning_rate": job.rate},
        "outer": {"method": job.entry.method, "steps": job.steps},
        # Rows are compared at the same number of tokens, also on a busy machine.
        "control": {"steps": "equal"},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "record": {"enabled": False},
        "network": PATIENT,
        "sites": {
            f"site-{number}": {"data": str(data.tokens(job.seed, number, job.sites))}
            for number in range(job.sites)
        },
    }
    if job.mode == "lora":
        raw["adapter"] = dict(ADAPTER)
    set_keys(raw, job.entry.settings)
    if job.entry.target is not None:
        raw["control"]["link"] = job.link(parameters[job.mode])
    return dilocox.resolve_run(raw)


def train(job: Job, config: RunConfig, log: Path, questions: Sequence[Chat]) -> Row | None:
    """Train a run and return its row. Its output goes to `log`; the run's folder is removed.

    A run that diverged has no `val_loss`, and the reason in `failed`. A trial is asked no
    questions. Returns None if an interrupt stopped the run. Raises `DilocoxError` for other
    failures.
    """
    began, right = time.monotonic(), None
    finished, failed = run_once(config, log)
    if not finished:
        return None
    seconds = round(time.monotonic() - began, 1)
    found = measured(config, job.sites, failed)
    if failed is None and not job.is_trial:
        right = asked(config.folder / "model", questions)
    row = {
        **job.key,
        "method": job.entry.method,
        "target": job.entry.target,
        "link": config.control.link,
        **found,
        "payload_bytes": read_summary(config)["payload_bytes"],
        "accuracy": right,
        "seconds": seconds,
    }
    shutil.rmtree(config.folder, ignore_errors=True)
    return row


def asked(folder: Path, questions: Sequence[Chat]) -> float:
    """Return the accuracy of the model in `folder` (`choice.accuracy`).

    The model is loaded in a child process, so that its memory is free again afterwards.
    """
    found: float = processes.call_in_child(_asked, folder, list(questions), on_progress=_quiet)
    return found


def _asked(folder: Path, questions: list[Chat], _progress: Any) -> float:
    return accuracy(folder, questions)


def _quiet(_step: str, _share: float) -> None:
    """Print no progress."""
