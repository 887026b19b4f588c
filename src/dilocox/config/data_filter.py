"""Type of the keys `filter` of the run file: which records of a source are taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

Scalar = str | int | float | bool


def flat_filter(given: object) -> object:
    """Returns a filter with the names of nested fields joined by dots.

    `{meta = {language = "en"}}` and `{"meta.language" = "en"}` are the same filter. Anything but a
    table is returned as it is, for the validation. Raises `ValueError` for a value that no field
    can have.
    """
    if not isinstance(given, Mapping):
        return given
    found: dict[str, Any] = {}
    for name, value in _leaves(given, ""):
        if name in found:
            raise ValueError(f"{name} is there twice: leave one out")
        choices = value if isinstance(value, list) else [value]
        if not choices:
            raise ValueError(f"{name} is an empty list, so no record would be taken")
        odd = [choice for choice in choices if not _is_scalar(choice)]
        if odd:
            raise ValueError(
                f"{name} is {odd[0]!r}: give a text, a finite number, true or false, or a list of "
                "these"
            )
        found[name] = value
    return found


def _leaves(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            if not value:
                raise ValueError(f"{before}{name} is an empty table: name a field in it")
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int)


Filter = Annotated[dict[str, Scalar | list[Scalar]], BeforeValidator(flat_filter)]
"""The value, or the list of values, that each named field must have."""
