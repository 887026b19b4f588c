"""Parses the JSON text of records, and says in words why a text cannot be read."""

from __future__ import annotations

import json
from typing import Any

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP = b"\x1f\x8b"


class DoubleKeyError(ValueError):
    """An object of JSON text has a key twice, so that one of the two values would be lost."""


def parse_json(text: str | bytes) -> object:
    """Returns the value of JSON text.

    Raises:
        DoubleKeyError: if an object has a key twice.
        ValueError, RecursionError: if the text is not valid JSON.
    """
    return json.loads(text, object_pairs_hook=object_of)


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of its keys and values. Raises `DoubleKeyError` if a key is there twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise DoubleKeyError(f"key {json.dumps(double)} is there twice in one object")
    return made


def problem_of(error: Exception, line: bytes = b"", element: str = "it") -> str:
    """Returns why JSON text cannot be read, and the remedy, as the end of a message.

    Args:
        error: the error of `parse_json`.
        line: the line of a file in JSON lines, if it is one.
        element: the thing to correct or remove.
    """
    if isinstance(error, DoubleKeyError):
        return f"{error}; remove one of the two"
    if line.startswith(_GZIP):
        return "compressed by gzip; give the name of the file the ending .gz"
    if line.startswith(_UTF16):
        return "not UTF-8 but UTF-16 text; convert the file to UTF-8"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason}); convert the file to UTF-8"
    ended = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
    if ended and line.lstrip().startswith(b"{"):
        return (
            "the JSON object does not end on its line; write each object on one line, or all "
            "objects in one array"
        )
    return f"not valid JSON ({error}); correct or remove {element}"
