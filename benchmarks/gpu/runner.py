"""One process per part: its limit, its rows as they come, its log."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import logs
from benchmarks.gpu.child import NEXT
from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import FAIL, INFO, LEFT_OUT, Results, Row, is_done

ROOT = Path(__file__).parents[2]
LOOK = 0.1
"""Seconds between two checks of a part's process."""
SLOWER = 3.0
"""Factor of a part's limit on a CPU."""
GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL, and after SIGKILL."""
WRITES = 1.0
"""Longest time in seconds that a process may write its stacks before the next one is asked."""
Job = tuple[Part, list[str]]


@dataclass(frozen=True)
class Setting:
    """Settings of all parts of one call."""

    scale: str
    work: Path
    deadline: float
    """Monotonic seconds after which no part runs."""
    path: str = ""
    """Further folders of PYTHONPATH."""
    show: Callable[[Row], None] = lambda row: None
    logs: Path | None = None
    """File that gets the ends of all logs."""
    clear: bool = False
    """Whether a part's folder is removed when the part has ended. Its runs take 3 to 30 GB."""


def order(jobs: Sequence[Job], results: Results, again: bool) -> list[Job]:
    """Return the rows to run: missing rows, then rows that failed. Rows that are done are left
    out."""
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
    """Run the parts in order. Each has the machine for itself: runs beside each other compile five
    times as long on 16 cores."""
    for part, names in jobs:
        run_part(part, names, results, setting)
        if setting.clear:
            shutil.rmtree(setting.work / part.name, ignore_errors=True)


def run_part(part: Part, names: list[str], results: Results, setting: Setting) -> None:
    """Run one part and add its rows. A row that the part did not write has the reason.

    The row in which the part's process crashed fails, and a new process measures the other rows.
    """
    if part.gpu_only and setting.scale not in ("auto", "gpu"):
        _rest(part, names, results, setting, LEFT_OUT, "needs a GPU", 0.0)
        return
    waiting = list(names)
    while waiting:
        if setting.deadline - time.monotonic() < _least(part, setting.scale):
            _rest(part, waiting, results, setting, LEFT_OUT, "no time left in this call", 0.0)
            return
        before = len(waiting)
        try:
            again = _attempt(part, waiting, results, setting)
        except Exception as error:  # a fault of one part must not end the call
            why = f"{type(error).__name__}: {error}"[:300]
            _rest(part, waiting, results, setting, FAIL, why, 0.0)
            return
        if not again or len(waiting) == before:
            return


def _attempt(part: Part, waiting: list[str], results: Results, setting: Setting) -> bool:
    """Run one process for the rows `waiting`. Every row that is added is removed from `waiting`.

    Returns whether another process must measure the rows that are left in `waiting`.
    """
    began = time.monotonic()
    folder = setting.work / part.name
    folder.mkdir(parents=True, exist_ok=True)
    rows, log, job = folder / "rows.jsonl", folder / "log.txt", folder / "job.json"
    rows.write_bytes(b"")
    told = {
        "function": part.function, "wanted": waiting, "scale": setting.scale,
        "folder": str(folder), "shared": str(setting.work), "rows": str(rows),
        "known": {row: results.rows[row]["figures"] for row in part.rows if row in results.rows},
    }  # fmt: skip
    job.write_text(json.dumps(told), encoding="utf-8")
    own = part.limit * (1 if setting.scale in ("auto", "gpu") else SLOWER)
    limit = min(own, setting.deadline - began)

    def add(row: Row) -> None:
        waiting.remove(row["name"])
        setting.show(results.add(part, row))

    follower = _Follower(rows, waiting, add)
    with _lifeline() as pipe:
        process = _start(job, log, pipe, setting.path)
        try:
            killed = follower.until_end(process, began + limit)
        except BaseException:
            _end(process)
            raise
        _end(process, stacks=killed)
    took = time.monotonic() - began
    if not killed:
        follower.read()
    begun = follower.begun if follower.begun in waiting else None
    if killed and limit < own:
        _rest(part, waiting, results, setting, LEFT_OUT, "the call's time was over", took)
        waiting.clear()
    elif waiting:
        code = process.returncode
        why = f"killed after {limit:.0f} s" if killed else f"exit code {code}"
        said = why if killed else f"{why}: {logs.last_line(log)}"
        for name in [begun] if begun is not None else list(waiting):
            if killed or begun is not None or code != NEXT:
                add(_row(name, FAIL, said, took))
        if killed and waiting:
            why = f"not begun: {begun} was {why}"
            _rest(part, waiting, results, setting, LEFT_OUT, why, 0.0)
            waiting.clear()
    if setting.logs is not None:
        logs.append(setting.logs, part.name, folder)
    return bool(waiting)


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """Yield the reading end of a pipe. Its other end closes with the context or this process."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def _start(job: Path, log: Path, pipe: int, path: str) -> subprocess.Popen[bytes]:
    """Start a part's process, which ends with `pipe`. `path`: further folders of PYTHONPATH."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", str(job), str(pipe)],
            cwd=ROOT,
            env=environment(path),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(pipe,),
        )


class _Follower:
    """Reads the output of a part's process: rows, and the names of rows that have begun."""

    def __init__(self, rows: Path, waiting: Sequence[str], add: Callable[[Row], None]) -> None:
        self._rows = rows
        self._waiting = waiting
        self._add = add
        self._at = 0
        self.begun: str | None = None
        """Name of the row that has begun last."""

    def read(self) -> None:
        """Read the new complete lines."""
        text = self._rows.read_bytes()[self._at :]
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            if "begun" in row:
                self.begun = row["begun"]
            elif row["name"] in self._waiting:
                self._add(row)

    def until_end(self, process: subprocess.Popen[bytes], until: float) -> bool:
        """Read rows until the process has ended. Returns True if its time was over before."""
        while True:
            ended = process.poll() is not None
            self.read()
            if ended:
                return False
            if time.monotonic() > until:
                return True
            time.sleep(LOOK)


def _end(process: subprocess.Popen[bytes], stacks: bool = False) -> None:
    """End the part's process and all processes that it has started.

    `stacks`: every process first writes the stacks of its threads (PYTHONFAULTHANDLER). A process
    that the system does not end, such as one that waits for a driver, is left running.
    """
    if stacks:
        _write_stacks(process.pid)
    for number in (signal.SIGKILL,) if stacks else (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _write_stacks(group: int) -> None:
    """Let the processes of a group write their stacks and end, one after the other.

    Children come before their parents, because the end of a parent kills the ranks that it has
    forked (`dilocox.utils.processes.die_with`).
    """
    end = time.monotonic() + GRACE
    asked: set[int] = set()
    while time.monotonic() < end:
        parents = {pid: up for pid, up in _members(group).items() if pid not in asked}
        last = [pid for pid in parents if pid not in parents.values()]
        if not last:
            return
        asked.add(last[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(last[0], signal.SIGABRT)
        until = time.monotonic() + WRITES
        while last[0] in _members(group) and time.monotonic() < until:
            time.sleep(0.02)


def _members(group: int) -> dict[int, int]:
    """Return the living processes of a process group, with their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    found[int(entry.name)] = int(fields[1])
    return found


def _row(name: str, verdict: str, message: str, seconds: float) -> Row:
    """Return a row without figures."""
    return {
        "name": name, "verdict": verdict, "message": message, "figures": {},
        "seconds": round(seconds, 2),
    }  # fmt: skip


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
        row = _row(name, verdict, message, seconds)
        made = results.add(part, row)
        # An earlier measurement stays in the file, but is no news of this call.
        setting.show({**row, "aims": []} if verdict == LEFT_OUT else made)


def _least(part: Part, scale: str) -> float:
    """Return the least time in which a part begins. Its duration on a CPU is not known
    beforehand."""
    return part.seconds if scale in ("auto", "gpu") else 5.0


def environment(path: str) -> dict[str, str]:
    """Return the environment of a part: this tree first, then `path`, then the caller's.

    A part that starts runs must not start CUDA itself, so PyTorch asks NVML for GPUs.
    """
    own = os.environ.get("PYTHONPATH", "")
    folders = [str(ROOT / "src"), str(ROOT), path, own]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each for each in folders if each),
        "PYTHONUNBUFFERED": "1",
        # A part that is killed writes its stacks.
        "PYTHONFAULTHANDLER": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Every rank has its own compiling processes; 16 per rank on 16 cores are too many.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "4"),
    }
