"""Sizes in bytes as run files write them."""

from __future__ import annotations

import re

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB)")


def parse_bytes(text: str) -> int:
    """Bytes of a text such as "500GB" or "1.5 TB"; units are decimal.

    Raises `ValueError` for another text, and for less than one byte.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is no size: write a number and {", ".join(UNITS)}, as "5GB"')
    size = int(float(found[1]) * UNITS[found[2]])
    if size < 1:
        raise ValueError(f'"{text}" is no size: give at least one byte')
    return size
