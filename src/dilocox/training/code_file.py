"""Loads the user's own functions from the file that the run file names (`site.code`).

A site only runs the file that lies on its own machine: no code comes over the network. The sites
agree on the SHA-256 of the file (`run.code`), and a file with another digest is not run.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.config.code_file import evaluation_task
from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError
from dilocox.inner import mean_cross_entropy
from dilocox.training.builder import Hooks
from dilocox.training.own_code import PARAMETERS, check_signatures
from dilocox.training.tasks.agreed_file import MODULE, check_digest, run_agreed
from dilocox.training.tasks.own_function import Score


@dataclass(frozen=True)
class FileHooks(Hooks):
    """The functions of a file. In a process that is not forked, the file is loaded again."""

    path: str = ""
    """Absolute path of the file."""
    digest: str = ""
    """SHA-256 of the file, hex."""
    evaluation: Score | None = None
    """Scores the shared model in a process beside training."""

    def check_agreed(self, agreed: str, *, required: bool) -> None:
        """See `Hooks`: what counts is the digest of the whole file."""
        check_digest(self.path, self.digest, agreed, "site.code")

    def __reduce__(self) -> tuple[Callable[..., FileHooks], tuple[str, str]]:
        """Pickle the path and the digest alone, since no other process has the module."""
        return load_hooks, (self.path, self.digest)


def load_hooks(path: str, agreed: str, asked: str = "site.code") -> FileHooks:
    """Run the file `path` and return its functions.

    Args:
        path: a Python file on this machine.
        agreed: SHA-256 of the file on which all sites agreed (`run.code`).
        asked: the key or option that names the file.

    Raises:
        ConfigError: there is no such file, it has another digest, it fails when it is run, or its
            functions are not those that a run can use.
    """
    found = _functions(run_agreed(path, agreed, asked), f"{asked} {path}")
    check_signatures(found, f"{asked} {path}: ")
    return FileHooks(
        dataset=found.get("dataset"),
        loss=found.get("loss", mean_cross_entropy),
        on_evaluation=found.get("on_evaluation"),
        validation=found.get("validation"),
        optimizer=found.get("optimizer"),
        schedule=found.get("schedule"),
        path=str(Path(path).expanduser().resolve()),
        digest=agreed,
        evaluation=found.get("evaluation"),
    )


def with_code(config: RunConfig, hooks: Hooks) -> tuple[RunConfig, Hooks]:
    """Return the run and the functions with which it trains, those of `site.code` included.

    A function `evaluation` of the file becomes one more task of `evaluation.tasks`. `hooks`: the
    functions that the caller gives; without `site.code` they are the result.

    Raises `ConfigError` if functions come from file and caller, and the errors of `load_hooks`.
    """
    path = config.site.code
    if path is None or isinstance(hooks, FileHooks):
        return config, hooks
    given = [*hooks.functions, *(["on_evaluation"] if hooks.on_evaluation else [])]
    if given:
        raise ConfigError(
            f"site.code {path}: the file has the user's own functions, and {given[0]} is given "
            "besides; move it into the file, or leave site.code out"
        )
    found = load_hooks(path, config.run.code)
    if found.evaluation is None:
        return config, found
    task = evaluation_task(found.path)
    tasks = [*(each for each in config.evaluation.tasks if each != task), task]
    own = config.evaluation.model_copy(update={"tasks": tasks})
    return config.model_copy(update={"evaluation": own}), found


def _functions(module: types.ModuleType, where: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of a run by their names. Raises `ConfigError` for any other name."""
    found = {name: vars(module)[name] for name in PARAMETERS if name in vars(module)}
    for name, function in found.items():
        if not callable(function):
            raise ConfigError(f"{where}: {name} is {type(function).__name__}, not a function")
    known = ", ".join(PARAMETERS)
    for name, value in vars(module).items():
        own = inspect.isfunction(value) and value.__module__ == MODULE
        if own and name not in PARAMETERS and not name.startswith("_"):
            raise ConfigError(
                f"{where}: {name} is no function of a run; use one of {known}, or begin the name "
                "of a helper with _"
            )
    if not found:
        raise ConfigError(f"{where}: has no function of a run; define one of {known}")
    return found
