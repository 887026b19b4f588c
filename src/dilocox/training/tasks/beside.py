"""Evaluations on tasks beside training: one site writes anchors, a process of its own reads them.

Training never waits for an evaluation, only the end of the run does. One evaluation runs at a time.
A stop of the run ends the process but keeps the model that is evaluated, so that the run evaluates
the model when it goes on. A failure is a warning and never ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dilocox.config.code_file import evaluation_task
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.messages import ReportKind, RoundPlan
from dilocox.coordinator.protocol.task_figures import moment
from dilocox.errors import DilocoxError, EvaluationError
from dilocox.training.builder import RankParts
from dilocox.training.control_plane import LeaseControl
from dilocox.training.tasks.child import Job, environment, read_result
from dilocox.training.tasks.harness import TaskOptions
from dilocox.utils import tracing

log = logging.getLogger(__name__)

FOLDER = "evaluations"
"""Folder in the run's folder, with a folder for each site that evaluates."""
LOOK = 0.2
"""Seconds between two looks at an evaluation at the end of the run."""
FIRST_WORD = 15.0
"""Seconds at the end of the run until the first line about the progress; then twice as many."""
_PROGRESS = re.compile(rb"(\d{1,3})%\|")
"""Share done in a progress bar of lm-eval."""
Export = Callable[[RankParts, Path], str]
"""Writes the anchor to a Hugging Face folder. Collective over the site. Returns the reason of a
failure, or an empty text."""


class Reporter(Protocol):
    """The part of a `CoordinatorClient` that this module needs."""

    def report(self, round_: int, metrics: dict[str, Any], kind: ReportKind = "round") -> object:
        """Report metrics of this site's round."""


def options_of(config: RunConfig) -> TaskOptions:
    """Return the tasks of a run file, and how they are evaluated."""
    own = config.evaluation
    code = config.site.code
    agreed = {} if code is None else {evaluation_task(code): config.run.code}
    return TaskOptions(
        tuple(own.tasks), own.tasks_limit, own.tasks_fewshot, own.tasks_chat, own.tasks_device,
        agreed,
    )  # fmt: skip


def is_due(config: RunConfig, round_: int) -> bool:
    """Return whether the anchor after `round_` is to be evaluated while the run trains.

    -1 means before training: then only given weights are worth an evaluation.
    """
    every = config.evaluation.tasks_every
    if round_ < 0:
        return config.model.path is not None and config.model.pretrained
    return every > 0 and (round_ + 1) % every == 0


def say_not_evaluated(client: Reporter, config: RunConfig, plan: RoundPlan) -> None:
    """Warn if the site that evaluates tasks takes no part in the flush of `plan`."""
    site = config.tasks_site
    if site is not None and site not in plan.members:
        text = (
            f"tasks were not evaluated at the end: site {site} (evaluation.tasks_site) has left; "
            "`dilocox evaluate` evaluates the finished model"
        )
        client.report(plan.round, {"text": text}, kind="warning")


@dataclass
class _Evaluation:
    """An evaluation that runs."""

    after_round: int
    began: float
    thread: threading.Thread | None = None
    process: subprocess.Popen[bytes] | None = None


class TaskEvaluations:
    """Evaluates anchors of this site on the run's tasks. Every rank of the site has one."""

    def __init__(
        self, config: RunConfig, site: str, client: Reporter, export: Export, cores: int
    ) -> None:
        """Prepare; nothing is started or written yet.

        Args:
            config: The run file.
            site: This site, which evaluates the tasks.
            client: Takes the reports; used from a thread of its own.
            export: See `Export`.
            cores: CPU cores of this process.
        """
        self._config, self._client, self._export = config, client, export
        self._folder = config.folder / FOLDER / site
        self._log = config.folder / "logs" / f"tasks-{site}.log"
        self._cores = cores
        self._running: _Evaluation | None = None
        self._closed = False

    def begin(self, rank: RankParts, round_: int) -> None:
        """Take up an evaluation that an earlier process left, from before `round_`.

        Results and models from `round_` on are removed, because the run trains these rounds again.
        """
        if not rank.place.leads or not self._folder.is_dir():
            return
        left = []
        for entry in self._folder.iterdir():
            number = _number(entry.stem)
            if number is None or number >= round_ or entry.suffix in (".part", ".job"):
                _remove(entry)
            elif entry.is_dir():
                left.append(number)
        for number in sorted(left)[:-1]:
            _remove(self._model(number))
        if left:
            self._start(max(left), self._model(max(left)))

    def after_round(self, rank: RankParts, round_: int) -> None:
        """Begin to evaluate the anchor after `round_`, if that is due. Collective over the site."""
        if not is_due(self._config, round_):
            return
        free = ""
        if rank.place.leads:
            if self._is_busy():
                assert self._running is not None
                self._warn(
                    round_,
                    f"the evaluation on tasks {moment(round_)} was skipped: the one "
                    f"{moment(self._running.after_round)} still runs{self._share()}",
                )
            else:
                free = "yes"
                for kind in ("", ".part", ".json"):
                    _remove(self._model(round_).with_suffix(kind))
        if not any(row[0] for row in rank.mesh.gather_names([free])):
            return
        part = self._model(round_).with_suffix(".part")
        with tracing.span("model for tasks", after_round=round_):
            problem = self._export(rank, part)
        if not rank.place.leads:
            return
        if not problem:
            try:
                part.replace(self._model(round_))
            except OSError as error:
                problem = f"{part}: {error}"
        if problem:
            _remove(part)
            self._warn(round_, f"tasks were not evaluated {moment(round_)} ({problem})")
            return
        self._start(round_, self._model(round_))

    def finish(self, rank: RankParts, round_: int, control: LeaseControl) -> None:
        """Wait for the evaluation that runs, then evaluate the finished model of the run.

        `round_`: number of the flush. A stop of the run ends the wait.
        """
        if not rank.place.leads:
            return
        model = self._config.folder / "model"
        self._await(control, round_)
        if self._closed:
            return
        if not model.is_dir():
            self._warn(round_, f"tasks were not evaluated at the end: {model} is not there")
            return
        tasks = ", ".join(self._config.evaluation.tasks)
        self._warn(round_, f"evaluates the finished model on tasks: {tasks}")
        self._start(round_, model, last=True)
        self._await(control, round_)

    def close(self) -> None:
        """End the process of an evaluation. Its model is kept for a run that goes on."""
        self._closed = True
        running = self._running
        if running is not None and running.process is not None:
            running.process.kill()
        if running is not None and running.thread is not None:
            running.thread.join()

    def _await(self, control: LeaseControl, round_: int) -> None:
        word, begin = FIRST_WORD, time.monotonic()
        while self._is_busy():
            control.touch()
            if control.news.phase != "running":
                self._warn(round_, "the evaluation on tasks was given up: the run is stopped")
                self.close()
                return
            if time.monotonic() - begin > word:
                word *= 2
                self._warn(round_, f"tasks are still being evaluated{self._share()}")
            time.sleep(LOOK)

    def _is_busy(self) -> bool:
        thread = None if self._running is None else self._running.thread
        return thread is not None and thread.is_alive()

    def _model(self, round_: int) -> Path:
        return self._folder / ("start" if round_ < 0 else f"round-{round_:05d}")

    def _start(self, round_: int, model: Path, *, last: bool = False) -> None:
        own = _Evaluation(round_, time.monotonic())
        own.thread = threading.Thread(
            target=self._run, args=(own, model, last), name="tasks", daemon=True
        )
        self._running = own
        own.thread.start()

    def _run(self, own: _Evaluation, model: Path, last: bool) -> None:
        """Evaluate the model in `model` and report. Runs in a thread of its own.

        `last`: the model is the run's, which is kept, and training needs no cores any more.
        """
        after, result = own.after_round, self._model(own.after_round).with_suffix(".json")
        try:
            if not result.exists():
                self._run_process(own, model, result, self._cores if last else self._cores // 2)
            if self._closed and not result.exists():
                return
            said = {"after_round": after, **read_result(result)}
            kind: ReportKind = "first_tasks" if after < 0 else "tasks"
            self._client.report(max(after, 0), said, kind)
        except (DilocoxError, OSError) as error:
            if self._closed:
                return
            self._warn(after, f"tasks were not evaluated {moment(after)}: {error}")
            _remove(result)
        if not last:
            _remove(model)

    def _run_process(self, own: _Evaluation, model: Path, result: Path, cores: int) -> None:
        """Run the process to its end. Raises `EvaluationError` if it hangs or is killed."""
        options, limit = options_of(self._config), self._config.evaluation.tasks_timeout
        result.parent.mkdir(parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        job = result.with_suffix(".job")
        Job(str(model), str(result), options, os.getpid(), max(1, cores)).write(job)
        command = [sys.executable, "-m", "dilocox.training.tasks.child", str(job)]
        with self._log.open("wb") as output:
            # The child dies with this thread, which waits for the child.
            own.process = subprocess.Popen(  # noqa: S603 - our own module
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment(os.environ, options.device),
            )  # fmt: skip
        if self._closed:
            own.process.kill()
        try:
            code = own.process.wait(limit)
        except subprocess.TimeoutExpired:
            own.process.kill()
            own.process.wait()
            raise EvaluationError(
                f"took longer than {limit:g} s (evaluation.tasks_timeout); tasks_limit evaluates "
                "fewer examples"
            ) from None
        finally:
            _remove(job)
        if not result.exists():
            how = f"was killed (signal {-code})" if code < 0 else f"ended with code {code}"
            raise EvaluationError(f"its process {how}; see {self._log}; is there enough memory?")

    def _share(self) -> str:
        """Return the share done of the progress bar that lm-eval wrote last, for a message."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - 400))
                found = _PROGRESS.findall(file.read())
        except OSError:
            return ""
        return f" ({int(found[-1])}% of its requests are done)" if found else ""

    def _warn(self, round_: int, text: str) -> None:
        log.warning("%s", text)
        try:
            self._client.report(max(round_, 0), {"text": text}, kind="warning")
        except DilocoxError as error:
            log.error("the coordinator could not be told: %s", error)


def _number(name: str) -> int | None:
    """Return the round of a file or folder of this name; None for other names."""
    if name == "start":
        return -1
    found = re.fullmatch(r"round-(\d+)", name)
    return None if found is None else int(found[1])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
