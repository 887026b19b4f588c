"""Counts and bytes for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes for people: `1.2 MB` (decimal units, as networks count)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < (999.5 if unit == "B" else 999.95) or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def number(count: float) -> str:
    """A count for people: `12.3k`."""
    for unit in ("", "k", "M", "G"):
        if abs(count) < (999.95 if unit else 999.5) or unit == "G":
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    raise AssertionError("unreachable")
