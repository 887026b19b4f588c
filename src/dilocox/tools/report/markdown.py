"""Writes Markdown from untrusted text: every cell and word is escaped. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown. All cells are escaped; no rows: a sentence that says so."""
    if not rows:
        return "Nothing is known."
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(plain(str(cell)) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return `text` as one line, with all Markdown and HTML escaped."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>|#~!&$])", r"\\\1", line)
