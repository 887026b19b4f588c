"""The log of one rank's process, and the files beside it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from dilocox.training.launch.rank_job import RankJob
from dilocox.utils import library_warnings

_REPLACED: list[TextIO] = []
"""Output streams that a rank's process used before its log."""


def flight_records(job: RankJob) -> Path:
    """Return the path with which names of this rank's NCCL flight records begin, beside its log."""
    logs = job.config.folder / "logs" if job.log_file is None else job.log_file.parent
    place = job.place
    return logs / f"{place.file_name}-nccl-"


def _lines_to(descriptor: int) -> TextIO:
    """Return a line-buffered text stream to a descriptor, which stays open after the stream."""
    return open(
        descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def set_up_log(job: RankJob) -> None:
    """Send the output of this process to the rank's log file, and set up `logging`."""
    library_warnings.silence()
    if job.log_file is not None:
        job.log_file.parent.mkdir(parents=True, exist_ok=True)
        stream = os.open(job.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        if stream > 2:
            os.close(stream)
        # Notebooks and output capture replace sys.stdout by a stream without a descriptor. The old
        # streams stay referenced: the stream that owns descriptor 1 would close it when freed.
        _REPLACED.extend((sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = _lines_to(1), _lines_to(2)
    logging.basicConfig(
        level=logging.DEBUG if job.debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
