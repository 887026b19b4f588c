"""The ledger of token ranges, checked: was a sequence trained on twice, or is one lost?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dilocox.coordinator.server.ledger import Ledger, Range


@dataclass(frozen=True)
class Audit:
    """Numbers of sequences, over all spaces."""

    committed: int
    """Trained on by a site that finished its round."""
    doubled: int
    """Of these, counted once too often: must be 0."""
    unsettled: int
    """Given out for a round that has not been finished, as at a stop."""
    waiting: int
    """Given back by a site that left or died, and not given out again before the end."""
    missing: int
    """Below the highest number given out, and in none of the above: must be 0."""

    @property
    def problem(self) -> str:
        """One line on what must not be; nothing if all is well."""
        if not self.doubled and not self.missing:
            return ""
        return (
            f"token ranges: {self.doubled} sequences were trained on twice and {self.missing} are "
            "accounted for nowhere; this is a defect of dilocox, ledger.json has the ranges"
        )


def audit(ledger: Ledger) -> Audit:
    """Check a ledger. Pure."""
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
    """The same numbers in ranges that do not touch, sorted."""
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
