"""Replays a round with all ranks of a site, each in its own process."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dilocox.data import TokenFiles
from dilocox.errors import DilocoxError, RecordError
from dilocox.tools.audit.round_replay import Progress, RankJob, RankReplay, follow, repeat
from dilocox.training.builder import ModelPlan
from dilocox.utils import processes


def repeat_site(jobs: Sequence[RankJob], progress: Progress) -> list[RankReplay]:
    """Replay a round with all ranks of a site, in new processes (`round_replay.repeat`).

    `jobs`: of the ranks that exchange. Ranks of further replicas are started in addition. Returns
    the results in the order of `jobs`. Raises the error of the rank that fails first.
    """
    # Modules imported before the fork need not be imported again by every rank of every round.
    ModelPlan.of(jobs[0].config, TokenFiles.open(jobs[0].data).vocabulary_size)
    with tempfile.TemporaryDirectory(prefix="dilocox-audit-") as name:
        meeting = str(Path(name) / "meeting")
        pipes: dict[Connection, int] = {}
        children = []
        answers: dict[int, RankReplay | None] = {}
        everyone = [*jobs, *_followers(jobs)]
        try:
            for number, job in enumerate(everyone):
                ours, theirs = processes.CONTEXT.Pipe(duplex=False)
                pipes[ours] = number
                title = f"audit-{job.place.file_name}"
                children.append(
                    processes.start(_in_child, replace(job, meeting=meeting), theirs, name=title)
                )
                theirs.close()
            while len(answers) < len(everyone):
                for ready in wait(list(pipes)):
                    assert isinstance(ready, Connection)
                    _heard(ready, pipes, answers, progress)
        finally:
            processes.end(children, grace=5.0 if len(answers) == len(everyone) else 0.0)
            for pipe in pipes:
                pipe.close()
        return [found for number in range(len(jobs)) if (found := answers[number]) is not None]


def _followers(jobs: Sequence[RankJob]) -> list[RankJob]:
    """Return the jobs of the ranks of further replicas."""
    replicas = range(1, jobs[0].config.site.replicas)
    return [
        replace(job, place=replace(job.place, replica=replica))
        for replica in replicas
        for job in jobs
    ]


def _heard(
    pipe: Connection, pipes: dict[Connection, int], answers: dict[int, Any], progress: Progress
) -> None:
    number = pipes[pipe]
    try:
        kind, value = pipe.recv()
    except EOFError:
        if number not in answers:
            raise RecordError("a repeating rank was killed; is there enough memory?") from None
        del pipes[pipe]
        pipe.close()
        return
    if kind == "error":
        raise value
    if kind == "step":
        if number == 0:
            progress(value)
    else:
        answers[number] = value


def _in_child(job: RankJob, pipe: Connection) -> None:
    # PyTorch's deprecation warnings have nothing to do with the audit.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        found = None
        if job.place.exchanges:
            found = repeat(job, lambda step: pipe.send(("step", step)))
        else:
            follow(job)
        pipe.send(("result", found))
    except DilocoxError as error:
        pipe.send(("error", error))
    except Exception as error:
        crash = DilocoxError(f"{job.place}: {type(error).__name__}: {error}")
        crash.add_note(traceback.format_exc())
        pipe.send(("error", crash))
