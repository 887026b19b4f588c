"""`dilocox` processes forked from one interpreter, as tests see them; it is `tests.support.forked`.

This module imports neither torch nor transformers, so that a test file which uses it is imported at
once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.harness import LIMIT, Run, Workshop


@dataclass(frozen=True)
class Order:
    """A process that is to be forked."""

    arguments: list[str]
    hooks: str = "none"
    namespace: str = ""
    environment: dict[str, str] = field(default_factory=dict)


class Forge:
    """The interpreter that processes are forked from, as a test sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked"],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            text=True,
        )

    def train(
        self, workshop: Workshop, name: str, *sets: str, hooks: str = "none",
        flags: tuple[str, ...] = (), sites: tuple[str, ...] = ("paris", "lyon"),
    ) -> ForkedRun:  # fmt: skip
        """Begin `dilocox train` with hooks and return when its process is there."""
        arguments = ["train", *workshop.run_file(name, *sets, sites=sites), *flags]
        run = ForkedRun(self._process, Order(arguments, hooks), workshop.folder(name))
        workshop.runs.append(run)
        return run

    def audit_exact(self, workshop: Workshop, run: ForkedRun) -> None:
        """Audit round 1 of site lyon, and assert that its verdict is EXACT."""
        words = ("audit", str(run.folder), "--round", "1", "--site", "lyon", "--json")
        audit = self.command(workshop, "audit", *words)
        assert audit.wait() == 0, audit.output()
        (verdict,) = json.loads(audit.printed())["verdicts"]
        assert verdict["verdict"] == "EXACT", verdict

    def command(
        self,
        workshop: Workshop,
        name: str,
        *arguments: str,
        namespace: str = "",
        hooks: str = "none",
        environment: Mapping[str, str] | None = None,
    ) -> ForkedRun:
        """Begin a `dilocox` command, `torchrun` or `python SCRIPT`, which belongs to the run called
        `name`; in a network namespace if one is named. `hooks`: of a join. `environment`: variables
        that are added."""
        order = Order(list(arguments), hooks, namespace, dict(environment or {}))
        run = ForkedRun(self._process, order, workshop.folder(name))
        workshop.runs.append(run)
        return run

    def close(self) -> None:
        """End it, and with it all that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


class _Process:
    """The part of `subprocess.Popen` that `Run` uses, for a process that is another's child."""

    def __init__(self, pid: int, gone: Path) -> None:
        self.pid = pid
        self.codes: dict[str, int] = {}
        self._gone = gone

    def poll(self) -> int | None:
        """Exit code, once it and all that it has left behind are gone."""
        if not self.codes and self._gone.exists():
            self.codes = json.loads(self._gone.read_text())
        return self.codes.get(str(self.pid))

    def wait(self, timeout: float = LIMIT) -> int:
        """Wait for `poll`."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("dilocox", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Signal to the process alone; nothing, as with `Popen`, once the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the whole group; nothing once all of it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class ForkedRun(Run):
    """A `Run` whose process was forked."""

    process: Any

    def __init__(self, forge: subprocess.Popen[str], order: Order, folder: Path) -> None:
        self.folder = folder
        self._log = folder.parent / f"{folder.name}-{time.monotonic_ns()}.out"
        self._log.touch()
        started = self._log.with_suffix(".pid")
        said = {**asdict(order), "log": str(self._log), "folder": str(folder)}
        assert forge.stdin is not None
        print(json.dumps(said), file=forge.stdin, flush=True)
        deadline = time.monotonic() + LIMIT
        while not started.exists():
            assert forge.poll() is None, "the interpreter to fork from has ended"
            assert time.monotonic() < deadline, "no process was forked"
            time.sleep(0.01)
        self.process = _Process(int(started.read_text()), self._log.with_suffix(".gone"))

    def ctrl_c(self) -> None:
        """What a terminal does: the signal goes to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left_behind(self) -> dict[str, int]:
        """Exit codes of processes that outlived their parents, after `wait`."""
        pid = str(self.process.pid)
        return {key: code for key, code in self.process.codes.items() if key != pid}
