"""Formats counts, byte sizes and errors for display."""

from __future__ import annotations


def size(count: float) -> str:
    """Returns a number of bytes for display, such as `1.2 MB`, in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < (999.5 if unit == "B" else 999.95) or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def number(count: float) -> str:
    """Returns a count for display, such as `12.3k`."""
    for unit in ("", "k", "M", "G"):
        if abs(count) < (999.95 if unit else 999.5) or unit == "G":
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300] if first else type(error).__name__
