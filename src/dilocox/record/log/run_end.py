"""Tells a run that has ended from one that goes on, by two files of the coordinator's folder.

A coordinator writes `summary.json` at its end. At its start it marks `record/log.pub`, so that the
summary of an earlier end is older. Whoever else opens the log leaves the mark.
"""

from __future__ import annotations

import os
from pathlib import Path

from dilocox.record.log.transparency_log import PUBLIC

SUMMARY = "summary.json"


def mark_start(run: Path) -> None:
    """Mark the run in the folder `run` as one that goes on. Raises `OSError`."""
    os.utime(run / "record" / PUBLIC)


def has_summary(run: Path) -> bool:
    """Return True if the last coordinator on the folder `run` has ended with a summary."""
    try:
        end, start = (run / SUMMARY).stat(), (run / "record" / PUBLIC).stat()
    except OSError:
        return False
    return end.st_mtime_ns > start.st_mtime_ns
