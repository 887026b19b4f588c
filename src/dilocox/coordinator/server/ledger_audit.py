"""Checks the ledger of token ranges for sequences that were trained on twice, or are lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dilocox.coordinator.server.ledger import Ledger, Range


@dataclass(frozen=True)
class Audit:
    """Result of `audit`: counts of sequences over all spaces."""

    committed: int
    """Sequences on which a site has trained in a round that it finished."""
    doubled: int
    """Repetitions among the committed sequences: must be 0."""
    unsettled: int
    """Sequences issued for a round that was not finished, for example because of a stop."""
    waiting: int
    """Sequences that a site returned when it left or died, and that were not issued again."""
    missing: int
    """Sequences below the highest issued one that are in no other count: must be 0."""

    @property
    def problem(self) -> str:
        """One line about a fault in the ledger; empty if there is none."""
        if not self.doubled and not self.missing:
            return ""
        return (
            f"token ranges: {self.doubled} sequences were trained on twice and {self.missing} are "
            "accounted for nowhere; this is a defect of dilocox, ledger.json has the ranges"
        )


def audit(ledger: Ledger) -> Audit:
    """Check a ledger and return the counts. Pure."""
    by_state: dict[str, dict[str, list[Range]]] = {"committed": {}, "issued": {}, "returned": {}}
    for entry in ledger.entries:
        ranges = by_state[entry.state].setdefault(entry.space, [])
        ranges.append((entry.start, entry.count))
    committed = sum(_length(ranges) for ranges in by_state["committed"].values())
    doubled = unsettled = waiting = missing = 0
    for space, end in ledger.next.items():
        done = by_state["committed"].get(space, [])
        held = by_state["issued"].get(space, [])
        back = ledger.pool.get(space, [])
        doubled += _length(done) - _length(union(done))
        unsettled += _length(union(held))
        waiting += _length(back)
        missing += end - _length(union([*done, *held, *back]))
    return Audit(committed, doubled, unsettled, waiting, missing)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ranges as sorted ranges that do not touch."""
    merged: list[Range] = []
    for start, count in sorted(ranges):
        if merged and start <= merged[-1][0] + merged[-1][1]:
            first, length = merged[-1]
            merged[-1] = (first, max(length, start + count - first))
        else:
            merged.append((start, count))
    return merged


def _length(ranges: Iterable[Range]) -> int:
    return sum(count for _, count in ranges)
