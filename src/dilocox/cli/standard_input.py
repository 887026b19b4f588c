"""Text that a command may be given on its standard input, as the hook of a run is."""

from __future__ import annotations

import io
import select
import sys

INPUT_SECONDS = 5.0
"""Seconds that a command waits for the beginning of the text."""


def given_text() -> str | None:
    """Return the text on standard input; None if there is none.

    An open pipe on which nothing comes for `INPUT_SECONDS`, as over SSH, counts as none.
    """
    try:
        if sys.stdin is None or sys.stdin.isatty():
            return None
        try:
            if not select.select([sys.stdin], [], [], INPUT_SECONDS)[0]:
                return None
        except io.UnsupportedOperation:  # text in memory, which is there at once
            pass
        return sys.stdin.read() or None
    except (OSError, ValueError):  # a closed one
        return None
