"""One process per part: its limit, its rows as they come, its log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import FAIL, INFO, LEFT_OUT, Results, Row, is_done

ROOT = Path(__file__).parents[2]
LOOK = 0.1
"""Seconds between two looks at a part's process."""
SLOWER = 3.0
"""Times a part's limit on a CPU."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
Job = tuple[Part, list[str]]


@dataclass(frozen=True)
class Setting:
    """How all parts of one call run."""

    scale: str
    work: Path
    deadline: float
    """Monotonic seconds after which nothing runs any more."""
    path: str = ""
    """Further folders of PYTHONPATH."""
    together: int = 1
    """Parts that may run beside each other, of those that are not `alone`."""
    show: Callable[[Row], None] = lambda row: None


def order(jobs: Sequence[Job], results: Results, again: bool) -> list[Job]:
    """What to run: rows that are missing, then rows that failed; no row that is done."""
    if again:
        return list(jobs)
    fresh, failed = [], []
    for part, names in jobs:
        missing = [n for n in names if n not in results.rows or _not_measured(results.rows[n])]
        broken = [n for n in names if n not in missing and not is_done(results.rows[n])]
        fresh += [(part, missing)] if missing else []
        failed += [(part, broken)] if broken else []
    return fresh + failed


def _not_measured(row: Row) -> bool:
    return row["verdict"] == LEFT_OUT or (row["verdict"] == INFO and not row["figures"])


def run_all(jobs: Sequence[Job], results: Results, setting: Setting) -> None:
    """Run the parts in order; those that are not `alone` beside their neighbours."""
    wave: list[Job] = []
    for at, job in enumerate(jobs):
        wave.append(job)
        after = jobs[at + 1][0] if at + 1 < len(jobs) else None
        if after is None or job[0].alone or after.alone:
            with ThreadPoolExecutor(max_workers=max(1, setting.together)) as pool:
                for done in [pool.submit(run_part, *each, results, setting) for each in wave]:
                    done.result()
            wave = []


def run_part(part: Part, names: list[str], results: Results, setting: Setting) -> None:
    """Run one part and add its rows; a row that the part did not write says why."""
    left = setting.deadline - time.monotonic()
    if part.gpu_only and setting.scale not in ("auto", "gpu"):
        _rest(part, names, results, setting, LEFT_OUT, "needs a GPU", 0.0)
        return
    if left < _least(part, setting.scale):
        _rest(part, names, results, setting, LEFT_OUT, "no time left in this call", 0.0)
        return
    began = time.monotonic()
    folder = setting.work / part.name
    folder.mkdir(parents=True, exist_ok=True)
    rows, log = folder / "rows.jsonl", folder / "log.txt"
    rows.unlink(missing_ok=True)
    rows.touch()
    job = folder / "job.json"
    job.write_text(
        json.dumps(
            {
                "function": part.function,
                "wanted": names,
                "scale": setting.scale,
                "folder": str(folder),
                "shared": str(setting.work),
                "rows": str(rows),
            }
        ),
        encoding="utf-8",
    )
    own = part.limit * (1 if setting.scale in ("auto", "gpu") else SLOWER)
    limit = min(own, left)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", str(job)],
            cwd=ROOT,
            env=environment(setting.path),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        killed = False
        try:
            killed = _follow(process, rows, began + limit, part, names, results, setting)
        finally:
            _end(process)
    took = time.monotonic() - began
    verdict, why = FAIL, f"exit code {process.returncode}: {_last_line(log)}"
    if killed and limit < own:
        verdict, why = LEFT_OUT, "the call's time was over"
    elif killed:
        why = f"killed after {limit:.0f} s; {_last_line(log)}"
    _rest(part, names, results, setting, verdict, why, took)


def _follow(
    process: subprocess.Popen[bytes],
    rows: Path,
    until: float,
    part: Part,
    names: list[str],
    results: Results,
    setting: Setting,
) -> bool:
    """Take over rows until the process has ended; true if its time was over before."""
    at = 0
    while True:
        ended = process.poll() is not None
        text = rows.read_bytes()[at:]
        whole = text[: text.rfind(b"\n") + 1]
        at += len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            if row["name"] in names:
                names.remove(row["name"])
                setting.show(results.add(part, row))
        if ended:
            return False
        if time.monotonic() > until:
            return True
        time.sleep(LOOK)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the part's process and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rest(
    part: Part,
    names: Sequence[str],
    results: Results,
    setting: Setting,
    verdict: str,
    message: str,
    seconds: float,
) -> None:
    for name in names:
        row = {
            "name": name, "verdict": verdict, "message": message, "figures": {},
            "seconds": round(seconds, 2),
        }  # fmt: skip
        setting.show(results.add(part, row))


def _least(part: Part, scale: str) -> float:
    """Seconds under which a part is not begun. What a CPU takes is not known beforehand."""
    return part.seconds if scale in ("auto", "gpu") else 5.0


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def environment(path: str) -> dict[str, str]:
    """A part's environment: this tree first, then `path`, then what the caller has.

    A part that starts runs must not start CUDA itself, so the question for a GPU goes to NVML.
    """
    own = os.environ.get("PYTHONPATH", "")
    folders = [str(ROOT / "src"), str(ROOT), path, own]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each for each in folders if each),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
