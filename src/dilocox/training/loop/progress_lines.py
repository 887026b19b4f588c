"""The lines about a site that a user's program shows."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass

from dilocox.utils.plain_text import plain_lines

log = logging.getLogger("dilocox.site")


@dataclass(frozen=True)
class ProgressLines:
    """Shows lines: by the program's own logging, otherwise on standard error.

    A program that has handlers for `logging` decides by itself what is shown, where and how: each
    line is a record of the logger `dilocox.site` at level INFO. Its logging is never changed.

    `quiet`: without handlers, show nothing.
    """

    quiet: bool = False

    def __call__(self, line: str) -> None:
        """Show a line."""
        if self.quiet or log.hasHandlers():
            log.info("%s", line)
            return
        # A closed standard error ends no training.
        with contextlib.suppress(OSError, ValueError):
            print(plain_lines(line), file=sys.stderr, flush=True)
