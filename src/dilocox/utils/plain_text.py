"""Text that a stranger may have written, made safe for a terminal.

A terminal obeys control characters: text with them can clear the screen, hide itself, or show a
verdict that nobody has given. Every replaced character becomes one character, so that limits on a
text's length hold, and a text that was made plain stays as it is.
"""

from __future__ import annotations

import re

INSTEAD = "\N{REPLACEMENT CHARACTER}"
_SPACES = re.compile("\r\n|[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")
_CONTROLS = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: ESC and the one-byte CSI among them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # order of reading (Unicode UAX #9)
    "\ud800-\udfff"  # half of a pair: cannot be encoded, so printing it would raise
    "]"
)


def plain(text: str) -> str:
    """`text` as one line without control characters.

    Line breaks and tabs become one space each, all other characters of C0 and C1, characters that
    change the order of reading, and lone surrogates become U+FFFD.
    """
    return _CONTROLS.sub(INSTEAD, _SPACES.sub(" ", text))


def plain_lines(text: str) -> str:
    """`text` with its line feeds, each of its lines made `plain`."""
    return "\n".join(plain(line) for line in text.split("\n"))
