"""Files of JSON objects, one per line.

Only a line feed ends a line. `str.splitlines` would also end it at other characters, and then two
readers could see other lines in the same file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_BEGUN = re.compile(r"(\{[ -~]*)?")
"""The begin of an object as `json.dumps` writes it, or nothing."""
_DECODER = json.JSONDecoder()


def lines_of_text(text: str) -> list[str]:
    """Return the lines of a text without their line feeds. The last one may lack its line feed."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def read_json_lines(path: Path) -> list[str]:
    """Return the lines of a file without their line feeds.

    Bytes that are not UTF-8 become U+FFFD. Raises `OSError` if the file cannot be read.
    """
    return lines_of_text(path.read_bytes().decode("utf-8", errors="replace"))


def object_of(line: str) -> dict[str, Any] | None:
    """Return the JSON object of a line. None if the line is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_torn(line: str) -> bool:
    """Return whether a damaged line may be one that its writer could not complete.

    A killed process leaves the begin of an object. A power cut may leave NUL instead of the rest.
    The next process ends this line and goes on in a new one.
    """
    text = line.rstrip("\n").rstrip("\0")
    if not _BEGUN.fullmatch(text):
        return False
    try:
        _, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return True
    return end == len(text)  # else something stands behind a complete object
