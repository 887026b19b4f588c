"""Base class of all sections of a run file, number types, and the reader of byte sizes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Bytes per unit of size. `parse_bytes` reads these units."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB)")


class Section(BaseModel):
    """Base class of all sections. Unknown keys are refused, and instances are immutable.

    Types are strict, since TOML has types: `"8"` or `true` in place of a number is an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that a text such as "500GB" or "1.5 TB" names.

    Units are decimal (1 kB = 1,000 bytes). Raises `ValueError` if `text` is not a size or names
    less than one byte.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(
            f'"{text}" is not a size: write a number and one of {", ".join(UNITS)}, such as "5GB"'
        )
    size = int(Decimal(found[1]) * UNITS[found[2]])
    if size < 1:
        raise ValueError(f'"{text}" is less than one byte: give at least one byte')
    return size
