"""Makes untrusted text safe to print on a terminal.

A terminal obeys control characters. Text that contains them can clear the screen, hide itself, or
show a forged verdict. Each unsafe character is replaced by one character, so that limits on the
length of a text still hold. Text that is already safe is not changed.
"""

from __future__ import annotations

import re

INSTEAD = "\N{REPLACEMENT CHARACTER}"
_SPACES = re.compile("\r\n|[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")
_CONTROLS = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: ESC and the one-byte CSI among them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # text direction (Unicode UAX #9)
    "\ud800-\udfff"  # lone surrogates: they cannot be encoded, so printing them would raise
    "]"
)


def plain(text: str) -> str:
    """Returns `text` as one line without control characters.

    Each line break or tab becomes one space. Other C0 and C1 control characters, characters that
    change the text direction, and lone surrogates become U+FFFD.
    """
    return _CONTROLS.sub(INSTEAD, _SPACES.sub(" ", text))


def plain_lines(text: str) -> str:
    """Returns `text` with `plain` applied to each of its lines; line feeds are kept."""
    return "\n".join(plain(line) for line in text.split("\n"))
