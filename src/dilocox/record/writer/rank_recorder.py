"""A rank's part in the record: it signs contributions and puts payloads into the store.

A background thread with a short queue writes to the store. If the store fails, the rank stops
writing but goes on training. If a disk is full, the thread waits for room.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import rfc8785
import torch
from torch import Tensor

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RankId
from dilocox.errors import DilocoxError, RecordError
from dilocox.models.weight_source import fresh_facts
from dilocox.outer.anchor_state import AnchorCopy
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.exchanger import Submit, for_landing
from dilocox.outer.staging import sha256_of
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Removals, Store
from dilocox.record.log.digests import TensorDigest, stage_root, tensor_bytes, tensor_digest
from dilocox.record.writer.dispersal import Dispersal
from dilocox.record.writer.exchange_statements import commitment, contribution
from dilocox.record.writer.signing_identity import SigningIdentity as SigningIdentity
from dilocox.record.writer.windows import Windows
from dilocox.utils import tracing
from dilocox.utils.rounding import is_bf16, round_to_bf16

log = logging.getLogger(__name__)

WAITING = 4
"""Exchanges whose payloads may be queued for the store. When the queue is full, exchanges wait."""


@dataclass(frozen=True)
class _Start:
    """The start state of a window."""

    round: int
    tick: int
    anchor: AnchorCopy


@dataclass(frozen=True)
class _Waiting:
    """One item of the queue for the store."""

    payloads: tuple[Tensor, ...] = ()
    start: _Start | None = None
    """Start state of a window that begins before these payloads; None: no window begins."""
    cut: tuple[ExchangeKey, int] | None = None
    """The exchange of these payloads, and the number of sites whose payloads count. None if the
    payloads are not cut into pieces."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set once the item is stored, or once the rank has stopped storing."""
    last: bool = False
    """Whether the thread ends here."""


class Coordinator(Protocol):
    """The calls of `CoordinatorClient` that the record needs."""

    def record_state(self, statement: str) -> None:
        """Send a signed statement of this rank's state to the log."""


class RankRecord:
    """One rank's part in the record of a run."""

    def __init__(
        self,
        author: SigningIdentity,
        store: Store,
        coordinator: Coordinator,
        warn: Callable[[str], None],
        patience: float,
        windows: Windows | None = None,
    ) -> None:
        """Start the background thread.

        Args:
            author: The identity that signs.
            store: Store for states, and for payloads without `windows`.
            coordinator: Takes signed statements.
            warn: Called once with one line if something cannot be stored.
            patience: Seconds that an exchange waits for a slow store before the rank stops storing.
            windows: Windows for payloads that are removed later. None: all payloads stay.
        """
        self._patience, self._windows = patience, windows
        self._author, self._store = author, store
        self._coordinator, self._warn = coordinator, warn
        self._queue: queue.Queue[_Waiting] = queue.Queue(WAITING)
        self._broken = False
        self.dispersal: Dispersal | None = None
        """Cuts stored payloads into pieces; None in a run without `[availability]`."""
        self._removals = Removals(warn, "all payloads stay")
        self._kept = 0
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def commit(self, given: Contribution, payload: bytes | None) -> str:
        """Sign the commitment to a contribution, which must have values; return the envelope.

        `payload`: SHA-256 of the payload; None if the payload does not depend on the values alone.
        """
        assert given.values is not None
        author = self._author
        with tracing.span("commit", key=given.key.text):
            values = sha256_of(given.values)
            named = None if payload is None else payload.hex()
            said = commitment(author.run, author.rank, given.key, values, named)
            return author.signer.sign(said)

    def sign(self, key: ExchangeKey, attempt: int, digest: str) -> str:
        """Sign that this rank contributes a payload of SHA-256 `digest`, hex."""
        author = self._author
        said = contribution(author.run, author.rank, key, attempt, digest)
        return author.signer.sign(said)

    def watching(self, submit: Submit) -> Submit:
        """Wrap `submit` so that the payloads of each outcome are stored.

        The returned outcome has payloads only if a window may begin before its landing: a window
        needs the payloads of exchanges in flight once more (`begin_round`).
        """

        def submitted(given: Contribution) -> Future[Outcome]:
            future = submit(given)
            outer = given.key.kind == "outer"
            kept = outer and self._windows is not None
            landing = future if kept else for_landing(given, future)
            if outer:
                future.add_done_callback(partial(self._done, given.key))
            return landing

        return submitted

    def keep(self, payloads: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to store `payloads`; return a function that waits until they are stored.

        This is for payloads that no other site has, before they count: a replay needs them even if
        this process is killed right afterwards. The wait ends early if the store makes no progress
        for `patience` seconds.
        """
        waiting = self._put(_Waiting(tuple(payloads)))

        def wait() -> None:
            with tracing.span("wait for the store"):
                while not self._broken and not waiting.over.wait(self._patience):
                    self._slow()

        return wait

    def begin_round(self, round_: int, tick: int, copy: Callable[[], AnchorCopy | None]) -> None:
        """Begin a new window if one is due with this round.

        Args:
            round_: The round that begins.
            tick: Slots of the run that have ended.
            copy: Copies the rank's anchor and outer momentum. Returns None at a rank that is
                entering the run or was overtaken, because its anchor is not the run's.
        """
        if self._windows is None or self._broken or not self._windows.due(round_):
            return
        with tracing.span("copy anchor", round=round_):
            anchor = copy()
        if anchor is None:
            return
        self._put(_Waiting(start=_Start(round_, tick, anchor)))
        # Payloads that were queued before the start are in the previous window, and a replay needs
        # them in this one, too. An exchange that ends later queues its payloads after the start.
        for payloads in anchor.ended():
            self._put(_Waiting(payloads))

    def state(
        self,
        kind: str,
        round_: int,
        tensors: Mapping[str, Tensor],
        files: Mapping[str, str] | None = None,
        rounded: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Sign that this rank's stage holds `tensors`, whole and in model order, after `round_`.

        Initial tensors are stored, in bf16 if all their values are exact in bf16. Of final tensors
        only the digests are stored. An error is reported with `warn`, and not raised.

        Args:
            kind: "initial" or "final".
            round_: The last finished round.
            tensors: Tensors of the stage by name.
            files: SHA-256 of the published folder's other files, by name.
            rounded: Converts a tensor to its published form, whose digests are signed, too. None if
                tensors are published as they are.
        """
        try:
            with tracing.span("record state"):
                digests = self._digests(tensors, stored=kind == "initial")
                listing = self._store.put(listing_of(digests))
                author, rank = self._author, self._author.rank
                subjects = {"state": stage_root(digests).hex(), "tensors": listing}
                if rounded is not None:
                    shown = [tensor_digest(name, rounded(each)) for name, each in tensors.items()]
                    subjects["published"] = stage_root(shown).hex()
                    subjects["published-tensors"] = self._store.put(listing_of(shown))
                said = {
                    "site": rank.site,
                    "stage": rank.stage,
                    "round": round_,
                    "kind": kind,
                    "files": dict(files or {}),
                    **({"class": fresh_facts()} if kind == "initial" else {}),
                }
                statement = s.Statement(s.CHECKPOINT, subjects, {"run": author.run, **said})
                self._coordinator.record_state(author.signer.sign(statement))
        except DilocoxError as error:
            self._give_up(error)

    def copy_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Store theta_0, which another site signs, as `state` does: tensors, and their list.

        An error is reported with `warn`, and not raised.
        """
        try:
            with tracing.span("copy theta_0"):
                self._store.put(listing_of(self._digests(tensors, stored=True)))
        except DilocoxError as error:
            log.error("record: %s", error)
            self._warn(f"record: {error}; this site keeps no copy of theta_0")

    def _digests(self, tensors: Mapping[str, Tensor], stored: bool) -> list[TensorDigest]:
        """Hash tensors; if `stored`, store them, in bf16 if all values are exact in bf16."""
        digests = []
        halved = stored and all(map(_in_bf16, tensors.values()))
        for name, tensor in tensors.items():
            digests.append(tensor_digest(name, tensor))
            if halved:
                rounded_bytes = tensor_bytes(round_to_bf16(tensor.detach().cpu()))
                self._store.put_bf16(rounded_bytes, digests[-1].sha256)
            elif stored:
                self._store.put(tensor_bytes(tensor), digests[-1].sha256)
        return digests

    def wait(self) -> None:
        """Block until all queued payloads are stored, or until a failure has been reported."""
        last, kept = self._put(_Waiting()), -1
        # A store that finishes an item within `patience` seconds is slow, but not stuck.
        while not self._broken and not last.over.wait(self._patience):
            if self._kept == kept:
                self._slow()
            kept = self._kept
        if self.dispersal is not None:
            self.dispersal.wait(self._patience)

    def close(self) -> None:
        """Let the thread end after all queued payloads. Does not wait.

        If the queue is full, its store is stuck, and so is the thread.
        """
        if not self._queue.full():
            self._queue.put(_Waiting(last=True))
        if self.dispersal is not None:
            self.dispersal.close()

    def _done(self, key: ExchangeKey, future: Future[Outcome]) -> None:
        if not future.cancelled() and future.exception() is None:
            found = future.result()
            cut = None if self.dispersal is None else (key, len(found.contributors))
            self._put(_Waiting(found.payloads, cut=cut))

    def _put(self, waiting: _Waiting) -> _Waiting:
        while not self._broken:
            try:
                self._queue.put(waiting, timeout=self._patience)
                break
            except queue.Full:
                self._slow()
        return waiting

    def _slow(self) -> None:
        """Stop storing, unless the store waits for room on a full disk."""
        if self._store.room.awaited:
            return
        slow = f"{self._store.where}: has kept nothing for {self._patience:.0f} s"
        self._give_up(RecordError(slow))

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for the next item and store it; return False after the last item.

        A thread that waits has no reference to its last payloads and state, whose memory is free.
        """
        waiting = self._queue.get()
        if waiting.last:
            return False
        try:
            if not self._broken and waiting.start is not None:
                self._begin_window(waiting.start)
            if not self._broken:
                kept = self._keep(waiting.payloads)
                if self.dispersal is not None and waiting.cut is not None and kept:
                    place = None if self._windows is None else self._windows.current
                    self.dispersal.stored(*waiting.cut, kept, place)
        except Exception as error:  # remote storage may raise any error
            self._give_up(error)
        finally:
            self._kept += 1
            waiting.over.set()
        return True

    def _keep(self, payloads: tuple[Tensor, ...]) -> list[tuple[str, int]]:
        """Store payloads; return (SHA-256, bytes) of each."""
        with tracing.span("keep payloads", payloads=len(payloads)):
            found = map(tensor_bytes, payloads)
            return [(self._put_bytes(data), data.nbytes) for data in found]

    def _put_bytes(self, data: memoryview, digest: str | None = None) -> str:
        """Store `data` in the newest window, or without windows in the store; return its digest."""
        if self._windows is None:
            return self._store.put(data, digest)
        self._windows.add(len(data))
        return self._windows.current.put(data, digest)

    def _begin_window(self, start: _Start) -> None:
        """Store and sign the start state of a window; then remove old windows."""
        assert self._windows is not None
        author, anchor = self._author, start.anchor
        with tracing.span("keep anchor", round=start.round):
            self._windows.open(start.round)
            digests = []
            for name, tensor in anchor.tensors.items():
                digests.append(tensor_digest(name, tensor))
                self._put_bytes(tensor_bytes(tensor), digests[-1].sha256)
            listing = self._put_bytes(memoryview(listing_of(digests)))
            subjects = {"state": stage_root(digests).hex(), "tensors": listing}
            place = (start.round, start.tick, anchor.landed)
            said = anchor_state(author.run, author.rank, *place, subjects)
            self._coordinator.record_state(author.signer.sign(said))
        self._drop_windows()

    def _drop_windows(self) -> None:
        assert self._windows is not None
        self._removals.attempt(self._windows.drop)

    def _give_up(self, error: Exception) -> None:
        log.error("record: %s", error)
        if not self._broken:
            self._broken = True
            self._warn(f"record: {error}; the run goes on, but cannot be verified in full")


def _in_bf16(tensor: Tensor) -> bool:
    """Return True if `tensor` is fp32 and all its values are exact in bf16."""
    return tensor.dtype == torch.float32 and is_bf16(tensor.detach().cpu())


def anchor_state(
    run: str,
    rank: RankId,
    round_: int,
    tick: int,
    landed: Sequence[int],
    subjects: Mapping[str, str],
) -> s.Statement:
    """Build a rank's statement of its anchor and outer momentum when a round begins.

    Args:
        run: Id of the run.
        rank: The rank.
        round_: The round that is about to begin.
        tick: Slots of the run that have ended.
        landed: By piece: the last round whose outer step the piece has taken; -1 if none has.
        subjects: Root (`state`) and listing (`tensors`), SHA-256 in hex.
    """
    return s.Statement(
        s.ANCHOR,
        subjects,
        {
            **s.round_of_rank(run, rank, round_, tick),
            "landed": list(landed),
        },
    )


MOMENTUM_OF = "outer-momentum/"
"""Prefix of the outer momentum's tensor names in the initial state of a run that continues another
run. Without such tensors the momentum is zero."""


def listing_of(tensors: list[TensorDigest]) -> bytes:
    """Encode a list of tensors, in model order, as canonical JSON, the form in the store."""
    return rfc8785.dumps([each.to_json() for each in tensors])
