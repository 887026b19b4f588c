"""Checks the tasks on which a run's model will be evaluated, before any process starts."""

from __future__ import annotations

from collections.abc import Callable

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.training.device_check import check_device
from dilocox.training.launch.console import Display
from dilocox.training.tasks.beside import options_of
from dilocox.training.tasks.harness import check_installed, check_tasks, split_tasks
from dilocox.utils import processes


def check_run_tasks(config: RunConfig, site: str | None, display: Display | None = None) -> None:
    """Load the run's tasks with their data, if this machine evaluates the tasks.

    `site`: the site that starts here; None: all sites. `display` shows the progress; may be None.
    Raises `ConfigError` if lm-eval or the device is missing, if a task cannot be loaded, or if
    `evaluation.tasks_every` is set without tasks.
    """
    every = config.evaluation.tasks_every
    if every and not config.evaluation.tasks:
        raise ConfigError(
            f"evaluation.tasks_every = {every} asks for evaluations on tasks, but tasks names "
            "none: name tasks, or leave tasks_every out"
        )
    if config.tasks_site is None or site not in (None, config.tasks_site):
        return
    if split_tasks(config.evaluation.tasks)[1]:
        check_installed()
    if config.evaluation.tasks_chat and config.data.tokenizer == "train":
        raise ConfigError(
            "evaluation.tasks_chat: a tokenizer that is trained on the corpus has no chat "
            "template; leave the key out, or name another data.tokenizer"
        )

    def progress(step: str, share: float) -> None:
        if display is not None:
            display.step(step)

    processes.call_in_child(_check, config, on_progress=progress)
    if display is not None:
        display.step_done()


def _check(config: RunConfig, progress: Callable[[str, float], None]) -> None:
    progress("loading the tasks of evaluation.tasks", 0.0)
    check_tasks(options_of(config))
    check_device(config.evaluation.tasks_device, "evaluation.tasks_device")
