"""Whole payloads that a site removes, once the pieces of their cut have a certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dilocox.coordinator.protocol.custody_messages import MOST_ASKED
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log.blob_store import Store
from dilocox.record.log.custody import Held
from dilocox.record.writer.dispersal_journal import Journal, Stored

MOST_WHOLE = 1000
"""Newest cuts that wait for a certificate. The payloads of older ones stay."""


@dataclass(frozen=True)
class OwnCut:
    """A cut whose piece is stored."""

    stored: Stored
    held: Held

    @property
    def round(self) -> int:
        """Round of the exchange."""
        return ExchangeKey.parse(self.stored.exchange).round


class WholePayloads:
    """Payloads of one rank that wait for a certificate."""

    def __init__(self, store: Store, journal: Journal, index: int, pieces: int) -> None:
        """Begin without any payloads.

        Args:
            store: The record's store.
            journal: What is not done yet; a cut is done once its payloads may be removed.
            index: Number of the site's piece.
            pieces: Number of all pieces.
        """
        self._store, self._journal = store, journal
        self._others = [each for each in range(pieces) if each != index]
        self._waiting: list[OwnCut] = []
        self._due: list[str] = []
        """Objects that could not be removed yet."""

    def __bool__(self) -> bool:
        """Return True if payloads wait, or could not be removed."""
        return bool(self._waiting or self._due)

    @property
    def asked(self) -> list[str]:
        """Exchanges whose certificates to ask for."""
        return [each.stored.exchange for each in self._waiting[-MOST_ASKED:]]

    def add(self, cuts: Sequence[OwnCut]) -> None:
        """Take cuts whose custody is signed."""
        waiting = [*self._waiting, *cuts]
        older, self._waiting = waiting[:-MOST_WHOLE], waiting[-MOST_WHOLE:]
        self._journal.done([each.stored for each in older])

    def remove(self, certified: Mapping[str, str]) -> None:
        """Remove the payloads of cuts that have a certificate for the root of this site.

        What cannot be removed is tried again with the next call. Raises `RecordError`.
        """
        ready = [
            each for each in self._waiting if certified.get(each.stored.exchange) == each.held.root
        ]
        self._waiting = [each for each in self._waiting if each not in ready]
        # Noted first. If the process is killed in between, a few payloads stay. In the other order
        # its next start would miss them, and would report pieces that nobody lacks.
        self._journal.done([each.stored for each in ready])
        if ready and not self._is_shared():
            left = {digest for each in self._journal.left() for digest, _ in each.objects}
            own = {digest for each in ready for digest, _ in each.stored.objects}
            self._due = sorted({*self._due, *(own - left)})
        elif ready:
            self._due = []
        while self._due:
            self._store.drop(self._due[0])
            del self._due[0]

    def _is_shared(self) -> bool:
        """Return True if another site writes to this store, and may still need the payloads."""
        return any(self._store.has_site(index) for index in self._others)
