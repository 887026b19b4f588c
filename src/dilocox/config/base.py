"""What all sections of a run file are, and the kinds of numbers that they hold."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Of sizes in bytes, as `parse_bytes` reads them."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB)")


class Section(BaseModel):
    """Base of all sections: unknown keys are refused and values cannot be changed later.

    Types are strict: TOML has them, so `"8"` or `true` for a number is a mistake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def parse_bytes(text: str) -> int:
    """Bytes of a text such as "500GB" or "1.5 TB"; units are decimal.

    Raises `ValueError` for another text, and for less than one byte.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is no size: write a number and {", ".join(UNITS)}, as "5GB"')
    size = int(Decimal(found[1]) * UNITS[found[2]])
    if size < 1:
        raise ValueError(f'"{text}" is no size: give at least one byte')
    return size
