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
from functools import partial
from pathlib import Path
from typing import Protocol

from dilocox.config.availability import PieceCode
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import DilocoxError, RecordError
from dilocox.record.log.blob_store import MissingError, Store
from dilocox.record.log.custody import MOST_HELD, Custody, Held, content_of
from dilocox.record.pieces.content import InMemory, OnDisk, Part
from dilocox.record.pieces.cut import cut_parts
from dilocox.record.writer.dispersal_journal import Journal, Stored
from dilocox.record.writer.signing_identity import SigningIdentity
from dilocox.record.writer.whole_payloads import OwnCut, WholePayloads
from dilocox.utils import tracing

log = logging.getLogger(__name__)

MOST_UNSIGNED = 1000
"""Newest cuts whose custody is tried again after an error."""
MOST_UNCUT = 1000
"""Newest exchanges whose payloads are cut again after an error of the store."""
ENDS = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each call that asks for the last certificates, at the end of a run."""


class Coordinator(Protocol):
    """The call of `CoordinatorClient` that availability needs."""

    def custody(self, statement: str | None, asked: Sequence[str]) -> Mapping[str, str]:
        """Submit a signed custody (None: only ask); return certified roots of `asked` exchanges."""


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
        self._whole = None
        if not keep_whole:
            self._whole = WholePayloads(store, journal, self._index, code.pieces)
        self._uncut: list[tuple[Stored, Store]] = []
        self._cut: list[OwnCut] = []
        self._marked = False
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
        self._attempt(self._mark)
        while (item := self._queue.get()) is not None:
            if not isinstance(item, threading.Event):
                self._uncut = [item, *self._uncut][:MOST_UNCUT]
            self._attempt(self._take_all)
            if isinstance(item, threading.Event):
                self._attempt(lambda: self._sign(self._cut))
                self._attempt(self._end)
                item.set()
            else:
                # One statement per round: exchanges of earlier rounds have all ended.
                newest = ExchangeKey.parse(item[0].exchange).round
                older = [each for each in self._cut if each.round < newest]
                self._attempt(partial(self._sign, older))
            self._done += 1

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # a storage may raise any error, and training goes on
            self._fail(error)

    def _mark(self) -> None:
        """Say in the store that this site writes to it."""
        if not self._marked:
            self._store.put_site(self._index)
            self._marked = True

    def _take_all(self) -> None:
        """Cut what is not cut yet, until the store fails."""
        self._mark()
        for _ in range(len(self._uncut)):
            item = self._uncut.pop(0)
            try:
                self._take(*item)
            except MissingError as error:  # a later attempt would not find them either
                self._fail(error)
            except Exception:
                self._uncut.append(item)  # as the last one: others are tried before it
                raise
            self._done += 1

    def _take(self, stored: Stored, place: Store) -> None:
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
        self._cut = [*self._cut, OwnCut(stored, held)][-MOST_UNSIGNED:]

    def _sign(self, cuts: Sequence[OwnCut]) -> None:
        """Sign and submit the custody of pieces; raise the first error after all were tried."""
        errors: list[DilocoxError] = []
        left = list(cuts)
        while left:
            # An exchange that a resume has repeated is in a statement of its own.
            batch: dict[str, OwnCut] = {}
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

    def _submit(self, batch: Sequence[OwnCut]) -> None:
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
        certified = self._coordinator.custody(text, self._whole.asked if self._whole else [])
        self._cut = [each for each in self._cut if each not in batch]
        if self._whole is None:
            self._journal.done([each.stored for each in batch])
            return
        self._whole.add(batch)
        self._whole.remove(certified)

    def _end(self) -> None:
        """Ask for the last certificates: the other sites sign theirs at about the same time."""
        for pause in ENDS:
            if not self._whole:
                return
            time.sleep(pause)
            self._whole.remove(self._coordinator.custody(None, self._whole.asked))

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
