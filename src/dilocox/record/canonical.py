"""Whether bytes are canonical JSON (RFC 8785), told quickly for almost all that a log holds.

Python's own encoder writes what RFC 8785 asks for, as long as there is no float, no large integer
and nothing but ASCII. All else is for `rfc8785`, which takes ten times as long.
"""

from __future__ import annotations

import json
from typing import Any

import rfc8785

_DIGITS = 15
"""Integers of so many digits are below 2^53."""


class _OtherError(Exception):
    """A number that is for `rfc8785`."""


def _float(text: str) -> float:
    raise _OtherError


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise _OtherError
    return int(text)


_plain = json.JSONDecoder(parse_float=_float, parse_int=_integer, parse_constant=_float)
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
