"""Whether bytes are canonical JSON (RFC 8785), told quickly for almost all that a log holds.

Python's own encoder writes what RFC 8785 asks for, as long as there is no large integer, nothing
but ASCII, and no float that is a whole number or needs an exponent. All else is for `rfc8785`,
which takes ten times as long.
"""

from __future__ import annotations

import json
from typing import Any

import rfc8785

_DIGITS = 15
"""Integers of so many digits are below 2^53."""


class _OtherError(Exception):
    """A number that is for `rfc8785`."""


def _constant(text: str) -> float:
    raise _OtherError


def _float(text: str) -> float:
    """A float that Python and RFC 8785 write alike: the shortest digits, and no exponent."""
    found = float(text)
    if "e" in text or text.endswith(".0") or repr(found) != text:
        raise _OtherError
    return found


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise _OtherError
    return int(text)


_plain = json.JSONDecoder(parse_float=_float, parse_int=_integer, parse_constant=_constant)
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def parsed(text: str) -> tuple[Any, bool]:
    """The JSON value of `text`, and whether `encoded` gives its canonical form.

    Raises ValueError for what is no JSON, and RecursionError.
    """
    if text.isascii():
        try:
            return _plain.decode(text), True
        except _OtherError:
            pass
    return json.loads(text), False


def encoded(value: Any, plain: bool) -> bytes:
    """The canonical JSON of a value, or of its parts put together anew; `plain`: as `parsed` says.

    Raises `rfc8785.CanonicalizationError`, TypeError and ValueError for what has none.
    """
    if plain:
        return _encoder.encode(value).encode()
    return rfc8785.dumps(value)


def dumps(value: Any) -> bytes:
    """The canonical JSON of a value. Raises as `encoded` does."""
    try:
        text = _encoder.encode(value)
        found, plain = parsed(text)
    except (TypeError, ValueError, RecursionError):
        return rfc8785.dumps(value)
    # Not equal: tuples, and names that are no text, of which `rfc8785` has its own opinion.
    return text.encode() if plain and found == value else rfc8785.dumps(value)
