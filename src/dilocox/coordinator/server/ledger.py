"""The ledger of token ranges: each sequence number is issued once, and again only if returned."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

Range = tuple[int, int]
"""(start, count)."""


@dataclass(slots=True)
class Entry:
    """A range of sequence numbers, issued to one site for one round."""

    site: str
    incarnation: int
    round: int
    space: str
    start: int
    count: int
    state: str = "issued"
    """One of issued, committed (the site has trained on it) and returned."""


@dataclass
class Ledger:
    """All ranges that were issued. `next` holds the first number never issued, by space. `pool`
    holds the returned ranges that wait to be issued again, by space, sorted and merged."""

    entries: list[Entry] = field(default_factory=list)
    next: dict[str, int] = field(default_factory=dict)
    pool: dict[str, list[Range]] = field(default_factory=dict)
    until: int | None = None
    """Ranges of rounds after this one are not recorded, for the ledger of a checkpoint. None: all
    rounds are recorded."""
    _open: dict[tuple[str, int], list[Entry]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for entry in self.entries:
            if entry.state == "issued":
                self._open.setdefault((entry.site, entry.incarnation), []).append(entry)

    def allocate(self, space: str, needed: int, offset: int, spare: list[Range]) -> list[Range]:
        """Propose ranges with `needed` numbers of `space`; `issue` records them.

        Numbers come first from `spare`, which is shortened, then from `next` plus `offset`. The
        ledger itself is not changed.
        """
        ranges: list[Range] = []
        while needed and spare:
            start, count = spare.pop(0)
            if count > needed:
                spare.insert(0, (start + needed, count - needed))
                count = needed
            ranges.append((start, count))
            needed -= count
        if needed:
            ranges.append((self.next.get(space, 0) + offset, needed))
        return ranges

    def issue(
        self, site: str, incarnation: int, round_: int, space: str, ranges: list[Range]
    ) -> None:
        """Record ranges that `allocate` proposed. Raises `ValueError` if a range is not free."""
        if self.until is not None and round_ > self.until:
            return
        for start, count in ranges:
            if start == self.next.get(space, 0):
                self.next[space] = start + count
            else:
                self._take(space, start, count)
            entry = Entry(site, incarnation, round_, space, start, count)
            self.entries.append(entry)
            self._open.setdefault((site, incarnation), []).append(entry)

    def commit(self, site: str, incarnation: int, round_: int) -> None:
        """Mark the ranges of a site's round as committed: the site has trained on them."""
        left = []
        for entry in self._open.get((site, incarnation), []):
            if entry.round == round_:
                entry.state = "committed"
            else:
                left.append(entry)
        self._open[site, incarnation] = left

    def give_back(self, site: str, incarnation: int) -> None:
        """Put all uncommitted ranges of a site back into the pool."""
        for entry in self._open.pop((site, incarnation), []):
            entry.state = "returned"
            self._put(entry.space, entry.start, entry.count)

    def give_back_range(self, space: str, start: int, count: int) -> None:
        """Put `count` numbers from `start` on into the pool: no site has trained on them."""
        self._put(space, start, count)

    def note_committed(self, site: str, space: str, ranges: list[Range]) -> None:
        """Record ranges that were trained on before this run, under the name `site`."""
        self.entries += [Entry(site, 0, 0, space, *each, "committed") for each in ranges]

    def adopt(self, site: str, incarnation: int) -> None:
        """Give a site that resumed the open ranges of its earlier incarnations."""
        entries = [
            entry for key in list(self._open) if key[0] == site for entry in self._open.pop(key)
        ]
        for entry in entries:
            entry.incarnation = incarnation
        self._open[site, incarnation] = entries

    @property
    def holders(self) -> list[tuple[str, int]]:
        """(site, incarnation) of all holders of ranges that are neither committed nor returned."""
        return [key for key, entries in self._open.items() if entries]

    def settle(self, round_: int, sites: list[str]) -> None:
        """Commit the ranges of `sites` for rounds before `round_`, which they have finished."""
        for site, incarnation in self.holders:
            if site in sites:
                for earlier in {entry.round for entry in self._open[site, incarnation]}:
                    if earlier < round_:
                        self.commit(site, incarnation, earlier)

    def reopen(self, round_: int, sites: Collection[str]) -> None:
        """Reopen ranges for a resume from a checkpoint of `sites` in `round_`.

        `round_` is the last round of this ledger. Its committed ranges become issued again, because
        they are trained on again. So do ranges of this round that `sites` returned, in case these
        sites come back.
        """
        for entry in self.entries:
            # Entries with incarnation 0 are those of the run before this one.
            if entry.round < round_ or entry.state == "issued" or not entry.incarnation:
                continue
            if entry.state == "returned":
                if entry.site not in sites:
                    continue
                self._take(entry.space, entry.start, entry.count)
            entry.state = "issued"
            self._open.setdefault((entry.site, entry.incarnation), []).append(entry)

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values; `from_json` is the inverse."""
        return {
            "entries": [asdict(entry) for entry in self.entries],
            "next": dict(self.next),
            "pool": {space: [list(item) for item in items] for space, items in self.pool.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], until: int | None = None) -> Ledger:
        """Return the ledger that `to_json` returned as `data`, with the given `until`."""
        return cls(
            [Entry(**entry) for entry in data["entries"]],
            dict(data["next"]),
            {space: [(a, b) for a, b in ranges] for space, ranges in data["pool"].items()},
            until,
        )

    def _take(self, space: str, start: int, count: int) -> None:
        pool = self.pool.get(space, [])
        for index, (first, length) in enumerate(pool):
            if first <= start and start + count <= first + length:
                rest = [(first, start - first), (start + count, first + length - start - count)]
                pool[index : index + 1] = [part for part in rest if part[1]]
                return
        raise ValueError(f"range {start}+{count} of {space} is not free")

    def _put(self, space: str, start: int, count: int) -> None:
        merged: list[Range] = []
        for first, length in sorted([*self.pool.get(space, []), (start, count)]):
            if merged and merged[-1][0] + merged[-1][1] == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        self.pool[space] = merged
