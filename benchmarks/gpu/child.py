"""The inside of a part's process: `python -m benchmarks.gpu.child JOB.json PIPE`.

PIPE is the number of an open file descriptor: the reading end of a pipe of the call.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCALES = ("gpu", "cpu", "tiny")
NEXT = 75
"""Exit code of a part's process in which CUDA is unusable. Another process measures the next
rows."""


@dataclass(frozen=True)
class Outcome:
    """Result of a check. `ok` is None if the check has figures and no verdict."""

    ok: bool | None
    message: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Context:
    """The argument of a part's function.

    `scale` is one of `SCALES`. `folder` belongs to the part, `shared` to all parts. `known` are
    the figures of the part's rows that were measured before this process, by row.
    """

    def __init__(
        self,
        scale: str,
        folder: Path,
        shared: Path,
        wanted: list[str],
        rows: Path,
        known: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.scale = scale
        self.folder = folder
        self.shared = shared
        self.wanted = wanted
        self.known = known or {}
        self._rows = rows

    @property
    def cuda(self) -> bool:
        """Whether the part runs on a GPU."""
        return self.scale == "gpu"

    def wants(self, *names: str) -> bool:
        """Return whether one of the rows is requested."""
        return any(name in self.wanted for name in names)

    def check(self, name: str, call: Callable[[], Outcome]) -> Outcome | None:
        """Measure the row `name` if it is requested, and write the row at once.

        An exception makes the row a FAIL, so that the other rows are still measured.
        """
        if name not in self.wanted:
            return None
        began = time.monotonic()
        self._append({"begun": name})
        unusable = False
        try:
            found = call()
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            text = " ".join(f"{type(error).__name__}: {error}".split())
            found = Outcome(False, text[:300])
            # Unless memory was short, every later call of CUDA in this process fails as well.
            unusable = "CUDA error" in text and "out of memory" not in text.lower()
        verdict = "INFO" if found.ok is None else "PASS" if found.ok else "FAIL"
        self.write(name, verdict, found.message, found.figures, time.monotonic() - began)
        if unusable:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(NEXT)
        return found

    def write(
        self, name: str, verdict: str, message: str, figures: dict[str, Any], seconds: float
    ) -> None:
        """Write a row."""
        row = {
            "name": name,
            "verdict": verdict,
            "message": message,
            "figures": {key: _plain(value) for key, value in figures.items()},
            "seconds": round(seconds, 2),
        }
        self._append(row)

    def _append(self, line: dict[str, Any]) -> None:
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def _plain(value: Any) -> Any:
    """Return a float rounded to five digits, and any other value unchanged."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def end_with(pipe: int) -> None:
    """Let all processes of this process group end as soon as the other end of `pipe` is closed.

    A call that is killed cannot end its parts, and their runs would keep the GPU from the next
    call. A process that watches the pipe ends them.
    """
    child = os.fork()
    if child:
        os.close(pipe)
        os.waitpid(child, 0)
        return
    # A child of the part could disturb code that waits for all of its children.
    if os.fork() == 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # It has no stacks to write, so it ends without a word.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.read(pipe, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def main() -> int:
    """Run the part that the job file names."""
    # A part that is killed writes its stacks. A dump of its memory could fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_with(int(sys.argv[2]))
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    context = Context(
        _scale(job["scale"]),
        Path(job["folder"]),
        Path(job["shared"]),
        job["wanted"],
        Path(job["rows"]),
        job["known"],
    )
    module, _, name = job["function"].partition(":")
    getattr(importlib.import_module(module), name)(context)
    return 0


def _scale(asked: str) -> str:
    if asked != "auto":
        return asked
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
