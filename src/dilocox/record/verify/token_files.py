"""Judges the claim `data`: the token files are those that the sites named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dilocox.data import TokenFiles
from dilocox.data.folder import folder_of_run
from dilocox.errors import ConfigError
from dilocox.record.verify import claims as c
from dilocox.record.verify.acceptance_claims import accepted_data
from dilocox.record.verify.run_history import RunHistory

Progress = Callable[[str, float], None]
"""Called with the name of a step and its finished share."""


def judge_data(course: RunHistory, named: Path | None, run: Path, progress: Progress) -> str:
    """Return what was found of the token files of a run.

    Args:
        course: the run as its log tells it.
        named: folder of the token files; None: the one that the run file names.
        run: folder of the run.
        progress: see `TokenFiles.verify`.

    Raises:
        NotRunError: the run has no text of its own, or the token files are not here.
        DataError: the token files are damaged, or the sites named others.
    """
    if course.config.get("data", {}).get("own"):
        raise c.NotRunError("the sites' own programs brought the data (data.own)")
    try:
        folder = named or folder_of_run(run)
    except ConfigError as error:
        raise c.NotRunError(str(error)) from None
    if not (folder / "manifest.json").exists():
        raise c.NotRunError(f"{folder}: has no token files; give their folder with --data")
    files = TokenFiles.open(folder)
    files.verify(progress)
    return accepted_data(course, files.digest, str(folder))
