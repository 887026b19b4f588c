"""Which round and site a line of `metrics.jsonl` is about.

The run's page and the claim `metrics` of `dilocox verify` both ask this module. So no line can
count for one of them and not for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dilocox.coordinator.protocol.site_reports import FIRST

_ROUND, _AFTER = "round", "after_round"
_NUMBERS: Mapping[str, tuple[str, int]] = {
    "round": (_ROUND, 0), "flush": (_ROUND, 0), "resumed": (_ROUND, 0),
    "evaluation": (_AFTER, -1), "tasks": (_AFTER, -1),
}  # fmt: skip
"""Field that holds the number of a round, and the smallest such number, by kind of line."""
_LARGEST = 2**53
"""Bound on the numbers: larger integers are not exact in every reader of JSON."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a line is about."""

    kind: str
    """`round`, `flush`, `evaluation`, `tasks` or `resumed`."""
    number: int
    """The round; -1 for an evaluation before training."""
    site: str
    """The site that has reported; empty for the whole run."""


def subject_of(record: Mapping[str, Any]) -> Subject | None:
    """Return what a line of `metrics.jsonl` is about. None for events, plans and other kinds.

    Raises `ValueError` if the line lacks the number or the site that every line of its kind has.
    """
    kind = record.get("kind")
    if kind in FIRST.values():
        raise ValueError(f"{kind} is the kind of a report, not of a line")
    if not isinstance(kind, str) or kind not in _NUMBERS:
        return None
    name, least = _NUMBERS[kind]
    number = record.get(name)
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{name} of a line of kind {kind} is not a whole number")
    if not least <= number < _LARGEST:
        raise ValueError(f"{name} of a line of kind {kind} is out of range")
    if kind == "resumed" or (kind == "round" and "site" not in record):
        return Subject(kind, number, "")
    site = record.get("site")
    if not isinstance(site, str) or not site:
        raise ValueError(f"site of a line of kind {kind} is not the name of a site")
    return Subject(kind, number, site)
