"""Whole runs of two sites on one GPU: trained and verified; stopped and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import product, sizes
from benchmarks.gpu.child import Context, Outcome

FIXED: dict[str, Any] = {
    "control": {"adapt": "off", "steps": "equal"},
    "checkpoint": {"every_rounds": 1},
}
"""A plan that does not depend on measured times."""
LONGEST = 240.0
"""Seconds after which a command is aborted."""
Record = dict[str, Any]


def command(*words: str | Path, log: Path) -> subprocess.CompletedProcess[str]:
    """Run a `dilocox` command to its end. Its stderr is in `log` as it is written."""
    with log.open("w+", encoding="utf-8", errors="replace") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "dilocox", *map(str, words)],
            stdout=subprocess.PIPE, stderr=errors, text=True, timeout=LONGEST,
        )  # fmt: skip
        errors.seek(0)
        done.stderr = errors.read()
    return done


def begin(
    *words: str | Path, log: Path, env: dict[str, str] | None = None
) -> subprocess.Popen[Any]:
    """Start a `dilocox` command. Its output goes to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "dilocox", *map(str, words)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env,
        )  # fmt: skip


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command printed."""
    lines = ((done.stderr or "").strip() or done.stdout.strip()).splitlines()
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def records(folder: Path) -> list[Record]:
    """Return the records of the complete lines of a run's metrics."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def rounds(folder: Path, site: str) -> list[Record]:
    """Return the site's records of its rounds."""
    return [r for r in records(folder) if r["kind"] == "round" and r.get("site") == site]


def until(condition: Callable[[], bool], process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for a condition. Raises `RuntimeError` if the process ends or the time is over
    before."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before, with exit code {process.returncode}")
        if time.monotonic() > end:
            raise RuntimeError(f"not after {seconds:.0f} s")
        time.sleep(0.05)


def figures(folder: Path, skip: int = 1) -> Record:
    """Return speed, waiting and loss of a run's sites, without the first `skip` rounds."""
    every = [r for r in records(folder) if r["kind"] == "round" and r.get("site")]
    later = [r for r in every if r["round"] >= skip] or every
    seconds = sum(r["seconds"] for r in later)
    return {
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in later),
        "wait_share": sum(r["wait_seconds"] for r in later) / seconds,
        "first_loss": every[0].get("loss"),
        "last_loss": every[-1].get("loss"),
        "rounds": len({r["round"] for r in every}),
    }


def train(path: Path, **options: Any) -> Any:
    """Train by the Python API. Functions patched in this process are patched in the ranks too."""
    import dilocox

    return dilocox.train(dilocox.load_run(path), overwrite=True, **options)


def verified(folder: Path) -> Outcome:
    """Run `dilocox verify` for a run, and return the outcome."""
    done = command("verify", folder, log=folder.with_name(f"{folder.name}-verify.log"))
    return Outcome(done.returncode == 0, last_line(done))


def trained(path: Path, name: str) -> Outcome:
    """Train a run of two sites. It passes if both finish and the loss falls."""
    result = train(path)
    found = figures(path.parent / name)
    falls = found["last_loss"] is not None and found["last_loss"] < found["first_loss"]
    said = "finished" if result.finished else result.phase
    return Outcome(
        result.finished and falls, said if falls else f"{said}; loss does not fall", found
    )


def two(context: Context) -> None:
    """Measure two rows: a run of two sites, and its verification."""
    path = sizes.run_file(
        context.folder, "two", sizes.SITE[context.scale], context.shared, context.scale,
        outer={"rounds": 4, "inner_steps": 10 if context.cuda else 4},
    )  # fmt: skip
    product.prepare(path, context.shared)
    context.check("two sites", lambda: trained(path, "two"))
    context.check("two sites, verify", lambda: verified(there(path, "two", lambda: train(path))))


def there(path: Path, name: str, train: Callable[[], object]) -> Path:
    """Return the folder of a finished run. Calls `train` if no earlier row has trained the run."""
    folder = path.parent / name
    if not (folder / "summary.json").exists():
        train()
    return folder


def resume(context: Context) -> None:
    """Measure one row: a run that is stopped and resumed."""
    context.check("resume", lambda: _resumed(context))


def _resumed(context: Context) -> Outcome:
    """Compare the last anchors of one run trained whole, and stopped by SIGINT in round 2 and
    resumed."""
    shape, scale = sizes.SITE[context.scale], context.scale
    outer = {"rounds": 4, "inner_steps": 20 if scale == "gpu" else 10, "slots": 10}
    paths = {
        name: sizes.run_file(
            context.folder, name, shape, context.shared, scale, outer=outer, **FIXED
        )
        for name in ("whole", "parts")
    }  # fmt: skip
    product.prepare(paths["parts"], context.shared)
    log, folder = context.folder / "parts.log", context.folder / "parts"
    process = begin("train", paths["parts"], "--overwrite", log=log)
    whole = begin("train", paths["whole"], "--overwrite", log=context.folder / "whole.log")
    try:
        until(lambda: bool(rounds(folder, "north")), process, LONGEST)
        os.kill(process.pid, signal.SIGINT)
        stopped = process.wait(LONGEST)
        before = len(rounds(folder, "north"))
        again = command("train", paths["parts"], "--resume", log=context.folder / "again.log")
        whole.wait(LONGEST)
    finally:
        for each in (process, whole):
            with contextlib.suppress(ProcessLookupError):
                each.kill()
    ends = [_last_anchor(context.folder / name) for name in ("whole", "parts")]
    same = ends[0] is not None and ends[0] == ends[1]
    found = {"stop_exit": stopped, "resume_exit": again.returncode, "rounds_before": before}
    if again.returncode:
        return Outcome(False, last_line(again), found)
    if before >= 4:
        return Outcome(False, "the stop came after the last round", found)
    lost = [name for name in ("whole", "parts") if alone(context.folder / name)]
    if lost:
        said = f"run {lost[0]} lost a site, so anchors differ; repeat on an idle machine"
        return Outcome(False, said, found)
    return Outcome(same, "the same last anchor" if same else "the last anchor differs", found)


def alone(folder: Path) -> bool:
    """Return whether a round of a run of two sites counts the contribution of one site only."""
    return any(r.get("contributors", 2) < 2 for r in records(folder) if r["kind"] == "round")


def _last_anchor(folder: Path) -> str | None:
    """Return the digest of the anchor at the end of a run."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    digest = summary.get("anchor_digest")
    return None if digest is None else str(digest)
