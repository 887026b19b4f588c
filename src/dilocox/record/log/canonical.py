"""Fast encoding and parsing of canonical JSON (RFC 8785), for almost all entries of a log.

Python's own encoder gives canonical JSON if all text is ASCII, no integer is large, and no float is
a whole number or needs an exponent. All other values go to the package `rfc8785`, which takes ten
times as long.
"""

from __future__ import annotations

import json
from typing import Any

import rfc8785

_DIGITS = 15
"""Integers of at most so many digits are below 2^53."""


class _OtherError(Exception):
    """A number that Python's encoder may not write in canonical form."""


def _constant(text: str) -> float:
    raise _OtherError


def _float(text: str) -> float:
    """Parse a float that Python and RFC 8785 write alike: shortest digits, no exponent."""
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
    """Parse JSON; return the value, and whether Python's encoder gives its canonical form.

    Raises `ValueError` if `text` is not JSON, and `RecursionError` if it is nested too deeply.
    """
    if text.isascii():
        try:
            return _plain.decode(text), True
        except _OtherError:
            pass
    return json.loads(text), False


def encoded(value: Any, plain: bool) -> bytes:
    """Encode a parsed value, or a new value made of its parts, as canonical JSON.

    `plain`: the flag that `parsed` returned. Raises `rfc8785.CanonicalizationError`, `TypeError` or
    `ValueError` if the value has no canonical form.
    """
    if plain:
        return _encoder.encode(value).encode()
    return rfc8785.dumps(value)


def dumps(value: Any) -> bytes:
    """Encode any value as canonical JSON. Raises like `encoded`."""
    try:
        text = _encoder.encode(value)
        found, plain = parsed(text)
    except (TypeError, ValueError, RecursionError):
        return rfc8785.dumps(value)
    # The parsed value differs for tuples and for keys that are not text: `rfc8785` decides there.
    return text.encode() if plain and found == value else rfc8785.dumps(value)
