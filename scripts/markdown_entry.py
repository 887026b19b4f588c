"""One entry of a generated reference page: a list item with a name and its meaning."""

from __future__ import annotations

import textwrap

WIDTH = 100
"""Largest number of characters of a line, unless one word is longer."""


def entry(head: str, meaning: str) -> str:
    """Return a Markdown list item: `head`, a colon, and `meaning` behind it.

    Args:
        head: the name and its type, in Markdown.
        meaning: one paragraph, in Markdown; may be empty.
    """
    text = f"{head}: {meaning}" if meaning else head
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
