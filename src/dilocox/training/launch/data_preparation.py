"""Prepares a run's token files before the run starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles
from dilocox.data import prepare as prepare_token_files
from dilocox.errors import ConfigError
from dilocox.training.launch.console import Display, tell
from dilocox.training.launch.reference import add_reference, check_reference
from dilocox.utils import processes

OWN_DATA = (
    "data.own: the run has no text, and the sites' own programs bring their batches; take part "
    "with dilocox.site, or give data.source"
)


def prepare_data(
    config: RunConfig,
    display: Display | None = None,
    begun: bool = False,
    overwrite: bool = False,
) -> TokenFiles:
    """Return the run's token files. If there are none yet, a child process makes them.

    `begun`: the run may have started with existing token files, so these are used even if their
    sources have changed since. `overwrite`: token files in the run's own folder that do not fit the
    run are made again. `display` may be None: then only warnings are printed.

    Raises `ConfigError` for a run without text (`data.own`).
    """
    if config.data.own:
        raise ConfigError(OWN_DATA)

    def progress(step: str, share: float) -> None:
        if display is not None:
            display.step(step, share)

    folder, said = processes.call_in_child(_prepare, config, begun, overwrite, on_progress=progress)
    if display is not None:
        display.step_done()
    for line in said:
        tell(line, display)
    return TokenFiles.open(folder)


def prepare_here(config: RunConfig, tell: Callable[[str], None]) -> TokenFiles:
    """Return the token files of a run that may have begun. They are made in this process.

    For a process of a user, which may hold threads and GPUs and so cannot be forked. `tell` gets
    warnings, and a line before token files are made.
    """
    begun = False

    def progress(_step: str, _share: float) -> None:
        nonlocal begun
        if not begun:
            begun = True
            tell(f"preparing token files in {config.data_folder}")

    folder, said = _prepare(config, True, False, progress)
    for line in said:
        tell(line)
    return TokenFiles.open(folder)


def _prepare(
    config: RunConfig, begun: bool, overwrite: bool, progress: Callable[[str, float], None]
) -> tuple[Path, list[str]]:
    said: list[str] = []
    computed = False

    def replaced(why: str) -> None:
        said.append(f"token files were made again (--overwrite), because the earlier ones did not "
                    f"fit: {why.partition(';')[0]}")  # fmt: skip

    def finish(folder: Path, content: dict[str, Any]) -> None:
        nonlocal computed
        if config.data.format == "preference":
            add_reference(config, folder, content, progress)
            computed = True

    files = prepare_token_files(
        config.data,
        config.data_folder,
        config.run.seed,
        progress,
        said.append if begun else None,
        replaced if overwrite and _is_the_runs(config) else None,
        finish,
    )
    # The check reads the whole model, which has just been read for a new reference.
    if config.data.format == "preference" and not computed:
        check_reference(config, files)
    return files.folder, said + files.warnings


def _is_the_runs(config: RunConfig) -> bool:
    """Return whether the token files are in the run's folder, and not behind a link from it."""
    folder = config.data_folder
    inside = Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(config.folder))
    return inside and not folder.is_symlink()
