"""Prepares a run's token files before the run starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles
from dilocox.data import prepare as prepare_token_files
from dilocox.training.launch.console import Display
from dilocox.training.launch.supervisor import print_error
from dilocox.utils import processes


def prepare_data(
    config: RunConfig, display: Display | None = None, begun: bool = False
) -> TokenFiles:
    """Return the run's token files. If there are none yet, a child process makes them.

    `begun`: the run may have started with existing token files, so these are used even if their
    sources have changed since. `display` may be None: then only warnings are printed.
    """

    def progress(step: str, share: float) -> None:
        if display is not None:
            display.step(step, share)

    folder, said = processes.call_in_child(_prepare, config, begun, on_progress=progress)
    if display is not None:
        display.step_done()
    for line in said:
        print_error(line) if display is None else display.line(line)
    return TokenFiles.open(folder)


def _prepare(
    config: RunConfig, begun: bool, progress: Callable[[str, float], None]
) -> tuple[Path, list[str]]:
    said: list[str] = []
    files = prepare_token_files(
        config.data, config.data_folder, config.run.seed, progress, said.append if begun else None
    )
    return files.folder, said + files.warnings
