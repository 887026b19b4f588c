"""A site's part in the exchanges of one rank: the flags and counts of an outer loop."""

from __future__ import annotations

from collections.abc import Iterable

from dilocox.outer.in_flight import Counts


class LoopStatus:
    """Flags and counts of one outer loop. Only the methods change them."""

    def __init__(self) -> None:
        self._dropping = self._overtaken = self._returning = False
        self._awaiting: set[int] = set()
        self._non_finite: str | None = None
        self._counts = Counts()

    @property
    def dropping(self) -> bool:
        """True: this site's contributions do not count until the round ends (non-finite values)."""
        return self._dropping

    def drop_round(self) -> None:
        """Let no contribution of this site count until `end_round`."""
        self._dropping = True

    def end_round(self) -> None:
        """Let contributions of this site count again."""
        self._dropping = False

    def report_non_finite(self, tensor: str) -> None:
        """Note the first non-finite value of a boundary's pseudo-gradient."""
        self._non_finite = tensor

    def take_non_finite(self) -> str | None:
        """Return the value of the last `report_non_finite`, once. None if there is no new one."""
        found, self._non_finite = self._non_finite, None
        return found

    @property
    def overtaken(self) -> bool:
        """True: an exchange took place without this site, so its anchor is no longer the run's."""
        return self._overtaken

    def mark_overtaken(self) -> None:
        """Note that an exchange took place without this site."""
        self._overtaken = True

    @property
    def returning(self) -> bool:
        """True: this site has entered the run again since its process began. Such a site keeps its
        residual when it adopts a piece."""
        return self._returning

    def mark_returning(self) -> None:
        """Note that this site, which was overtaken, enters the run again."""
        self._overtaken, self._returning = False, True

    @property
    def awaiting(self) -> frozenset[int]:
        """While this site enters: pieces whose state has not arrived yet."""
        return frozenset(self._awaiting)

    def expect(self, pieces: Iterable[int]) -> None:
        """Hold landings on `pieces` back until the state of each piece has arrived."""
        self._awaiting = set(pieces)

    def mark_arrived(self, piece: int) -> None:
        """Note that the state of `piece` has arrived."""
        self._awaiting.discard(piece)

    @property
    def counts(self) -> Counts:
        """Costs of the exchanges of this round so far."""
        return self._counts

    def take_counts(self) -> Counts:
        """Return the counts, and begin to count from zero."""
        taken, self._counts = self._counts, Counts()
        return taken
