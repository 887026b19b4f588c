"""A rank's part in availability: it cuts payloads, keeps its piece, and signs custody.

A thread of its own does this beside training, and may lag behind by any number of rounds: training
never waits for it. The queue holds names of payloads, not their bytes, and a journal on disk has
the same names, so that a rank that was killed goes on where it was.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dilocox.config.availability import PieceCode
from dilocox.coordinator.protocol.custody_messages import MOST_ASKED
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import DilocoxError, RecordError
from dilocox.record.log.blob_store import Store
from dilocox.record.log.custody import MOST_HELD, Custody, Held, content_of
from dilocox.record.pieces.content import InMemory, OnDisk, Part
from dilocox.record.pieces.cut import cut_parts
from dilocox.record.writer.dispersal_journal import Journal, Stored
from dilocox.record.writer.signing_identity import SigningIdentity
from dilocox.utils import tracing

log = logging.getLogger(__name__)

MOST_UNSIGNED = 1000
"""Newest cuts whose custody is tried again after an error."""
MOST_WHOLE = 1000
"""Newest cuts that wait for a certificate. The payloads of older ones stay."""
ENDS = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each call that asks for the last certificates, at the end of a run."""


class Coordinator(Protocol):
    """The call of `CoordinatorClient` that availability needs."""

    def custody(self, statement: str | None, asked: Sequence[str]) -> Mapping[str, str]:
        """Submit a signed custody (None: only ask); return certified roots of `asked` exchanges."""


@dataclass(frozen=True)
class _Cut:
    """A cut whose piece is stored."""

    stored: Stored
    held: Held

    @property
    def round(self) -> int:
        """Round of the exchange."""
        return ExchangeKey.parse(self.stored.exchange).round


_Item = tuple[Stored, Store] | threading.Event | None
"""Payloads and the store that has them; an event that is set once all is signed; None: the end."""


class Dispersal:
    """Cuts the payloads of one rank's exchanges, in a thread of its own."""

    def __init__(
        self,
        author: SigningIdentity,
        store: Store,
        coordinator: Coordinator,
        warn: Callable[[str], None],
        code: PieceCode,
        journal: Journal,
        keep_whole: bool = True,
    ) -> None:
        """Start the thread, which begins with what the journal has left over.

        Args:
            author: The identity that signs.
            store: The record's store, which has the payloads and gets the pieces.
            coordinator: Takes signed custody.
            warn: Called once with one line if pieces cannot be kept or signed.
            code: Which site has which piece.
            journal: What is not done yet.
            keep_whole: False to remove payloads whose pieces have a certificate.
        """
        self._author, self._store, self._coordinator = author, store, coordinator
        self._warn, self._code, self._journal = warn, code, journal
        self._index = code.sites.index(author.rank.site)
        self._keep_whole = keep_whole
        self._cut: list[_Cut] = []
        self._whole: list[_Cut] = []
        self._failed: list[tuple[Stored, Store]] = []
        self._done, self._warned = 0, False
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        for each in journal.left():
            self._queue.put((each, store))
        self._thread = threading.Thread(target=self._run, name="availability", daemon=True)
        self._thread.start()

    def stored(
        self,
        key: ExchangeKey,
        contributors: int,
        objects: Sequence[tuple[str, int]],
        place: Store | None = None,
    ) -> None:
        """Cut the payloads of an exchange, which a store has now. Returns at once.

        Args:
            key: The exchange.
            contributors: Number of sites whose payloads count; theirs come first in `objects`.
            objects: (SHA-256 in hex, bytes) of the payloads and of what belongs to them.
            place: The store that has them; None: the record's store.
        """
        if contributors:
            stored = Stored(key.text, contributors, tuple(objects))
            self._journal.add(stored)
            self._queue.put((stored, place or self._store))

    def wait(self, patience: float) -> None:
        """Block until everything so far is cut and signed, or makes no progress for `patience` s.

        Only the end of a run waits like this, when nothing is left to train.
        """
        over = threading.Event()
        self._queue.put(over)
        done = -1
        while not over.wait(patience) and done != self._done:
            done = self._done

    def close(self) -> None:
        """Let the thread end after everything so far. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    self._retry()
                    self._sign(self._cut)
                    self._end()
                else:
                    own = self._try(item)
                    # One statement per round: exchanges of earlier rounds have all ended.
                    self._sign([each for each in self._cut if each.round < own.round])
            except Exception as error:  # a storage may raise any error, and training goes on
                self._fail(error)
            finally:
                self._done += 1
                if isinstance(item, threading.Event):
                    item.set()

    def _try(self, item: tuple[Stored, Store]) -> _Cut:
        """Cut payloads, and note them if that fails."""
        try:
            return self._take(*item)
        except Exception:
            self._failed = [*self._failed, item][-MOST_UNSIGNED:]
            raise

    def _retry(self) -> None:
        """Cut what could not be cut before: the store may be back."""
        failed, self._failed = self._failed, []
        for item in failed:
            try:
                self._try(item)
            except Exception as error:  # as in `_run`
                self._fail(error)

    def _take(self, stored: Stored, place: Store) -> _Cut:
        """Cut payloads and keep the site's piece. A storage may raise any error."""
        with tracing.span("cut payloads", key=stored.exchange):
            objects = [_part(place, digest, size) for digest, size in stored.objects]
            found = cut_parts(objects, self._code.needed, self._code.pieces, [self._index])
            if found.layout.objects != stored.objects:
                raise RecordError(f"{place.where}: payloads of {stored.exchange} are damaged")
            file = found.pieces[self._index].to_bytes()
            self._store.put_piece(found.root.hex(), self._index, file)
        content = content_of([digest for digest, _ in stored.objects[: stored.contributors]])
        leaf = found.leaves[self._index].hex()
        held = Held(stored.exchange, content, found.root.hex(), leaf, len(file))
        own = _Cut(stored, held)
        self._cut = [*self._cut, own][-MOST_UNSIGNED:]
        return own

    def _sign(self, cuts: Sequence[_Cut]) -> None:
        """Sign and submit the custody of pieces; raise the first error after all were tried."""
        errors: list[DilocoxError] = []
        left = list(cuts)
        while left:
            # An exchange that a resume has repeated is in a statement of its own.
            batch: dict[str, _Cut] = {}
            for each in left:
                if len(batch) < MOST_HELD:
                    batch.setdefault(each.stored.exchange, each)
            left = [each for each in left if batch.get(each.stored.exchange) is not each]
            try:
                self._submit(list(batch.values()))
            except DilocoxError as error:  # these are tried again with the next round
                errors.append(error)
        if errors:
            raise errors[0]

    def _submit(self, batch: Sequence[_Cut]) -> None:
        author, rank = self._author, self._author.rank
        said = Custody(
            site=rank.site,
            stage=rank.stage,
            shard=rank.shard,
            round=max(each.round for each in batch),
            needed=self._code.needed,
            pieces=self._code.pieces,
            index=self._index,
            held=tuple(each.held for each in batch),
        )
        text = author.signer.sign(said.statement(author.run))
        certified = self._coordinator.custody(text, self._asked())
        self._cut = [each for each in self._cut if each not in batch]
        if self._keep_whole:
            self._journal.done([each.stored for each in batch])
            return
        self._whole += batch
        self._drop(certified)
        older, self._whole = self._whole[:-MOST_WHOLE], self._whole[-MOST_WHOLE:]
        self._journal.done([each.stored for each in older])

    def _asked(self) -> list[str]:
        return [each.stored.exchange for each in self._whole[-MOST_ASKED:]]

    def _end(self) -> None:
        """Ask for the last certificates: the other sites sign theirs at about the same time."""
        for pause in ENDS:
            if not self._whole:
                return
            time.sleep(pause)
            self._drop(self._coordinator.custody(None, self._asked()))

    def _drop(self, certified: Mapping[str, str]) -> None:
        """Remove the payloads of cuts that have a certificate for the root of this site."""
        ready = [
            each for each in self._whole if certified.get(each.stored.exchange) == each.held.root
        ]
        self._whole = [each for each in self._whole if each not in ready]
        for each in ready:
            own = {digest for digest, _ in each.stored.objects}
            others = [stored for stored in self._journal.left() if stored != each.stored]
            left = {digest for stored in others for digest, _ in stored.objects}
            if not self._is_shared(each.held.root):
                for digest in sorted(own - left):
                    self._store.drop(digest)
            self._journal.done([each.stored])

    def _is_shared(self, root: str) -> bool:
        """Return True if another site writes to this store, and may still need the payloads."""
        others = (index for index in range(self._code.pieces) if index != self._index)
        return any(self._store.has_piece(root, index) for index in others)

    def _fail(self, error: Exception) -> None:
        log.error("availability: %s", error)
        if not self._warned:
            self._warned = True
            self._warn(f"availability: {error}; the run goes on, some pieces are late or missing")


def _part(store: Store, digest: str, size: int) -> Part:
    """Return a stored object of `size` bytes; of a folder, without reading it.

    Raises `MissingError` if the store does not have it, and `RecordError` like `Store.get`.
    """
    path = Path(store.path(digest))
    if store.folder is not None and path.is_file():
        return OnDisk(path, size)
    return InMemory(store.fresh().get(digest))
