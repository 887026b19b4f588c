"""The process that evaluates one model on tasks: `python -m dilocox.training.tasks.child JOB`.

`JOB` is a JSON file, the fields of `Job`. The process runs at the lowest priority, writes the
results or the reason of a failure to the file `Job.result`, and ends. It dies with its parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilocox.coordinator.protocol.task_figures import as_report, figures_of
from dilocox.errors import DilocoxError, EvaluationError
from dilocox.training.tasks.harness import TaskOptions
from dilocox.utils.processes import die_with

LOWEST = 19
"""Niceness: the process gets the time of a core that nothing else wants."""
_LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
              "MASTER_PORT")  # fmt: skip
"""Variables by which accelerate would take this process for a rank of the training."""
_LEFT_OUT = ("pretty_env_info", "upper_git_hash", "git_hash")
"""Fields of lm-eval's results about the machine."""


@dataclass(frozen=True)
class Job:
    """The arguments of the process."""

    model: str
    """Hugging Face folder."""
    result: str
    """File that the process writes."""
    options: TaskOptions
    parent: int
    """Process id of the parent."""
    threads: int
    """CPU threads."""

    def write(self, file: Path) -> None:
        """Write the job to `file`."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Job:
        """Read the job from `file`."""
        said = json.loads(file.read_text(encoding="utf-8"))
        options = said.pop("options")
        return cls(options=TaskOptions(**{**options, "tasks": tuple(options["tasks"])}), **said)


def environment(own: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the environment of the process. `own`: environment of the parent."""
    found = {key: value for key, value in own.items() if key not in _LAUNCHERS}
    # A process that computes on the CPU must not take memory of a GPU.
    return found if device != "cpu" else {**found, "CUDA_VISIBLE_DEVICES": ""}


def read_result(file: Path) -> dict[str, Any]:
    """Return the report in the file that the process has written.

    Raises `EvaluationError` with the reason if the evaluation failed, or if no file is there.
    """
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        if "error" not in said:
            return dict(said["report"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"its results cannot be read ({error})") from None
    raise EvaluationError(str(said["error"]))


def _evaluate(job: Job) -> dict[str, Any]:
    import torch

    from dilocox.training.tasks.harness import evaluate_folder

    torch.set_num_threads(job.threads)
    results = evaluate_folder(Path(job.model), job.options)
    kept = {key: value for key, value in results.items() if key not in _LEFT_OUT}
    return {"report": as_report(figures_of(results)), "lm_eval": kept}


def main(file: Path) -> int:
    """Do the job in `file`. Returns the exit code: 0, or 1 after a failure."""
    job = Job.read(file)
    # Ctrl-C in a terminal reaches every process: the parent alone reacts to it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with(job.parent)
    os.nice(LOWEST)
    try:
        said = _evaluate(job)
    except DilocoxError as error:
        said = {"error": str(error)}
    except Exception as error:  # of lm-eval or of a task
        said = {"error": f"{type(error).__name__}: {error}"}
    part = Path(f"{job.result}.part")
    part.write_text(json.dumps(said, indent=1, default=str) + "\n", encoding="utf-8")
    part.replace(job.result)
    return int("error" in said)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
