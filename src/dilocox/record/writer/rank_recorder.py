"""What a rank does for the record: it signs its contributions and keeps payloads in the store.

Keeping runs in a thread of its own behind a short queue, beside training and exchanges. A store
that fails ends the keeping, not the run; a full disk is waited for.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
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
from dilocox.outer.staging import sha256_of
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Removals, Store
from dilocox.record.log.digests import TensorDigest, stage_root, tensor_bytes, tensor_digest
from dilocox.record.writer.notary import commitment, contribution
from dilocox.record.writer.windows import Windows
from dilocox.utils import tracing
from dilocox.utils.rounding import is_bf16, round_to_bf16

log = logging.getLogger(__name__)

WAITING = 4
"""Exchanges whose payloads may wait for the store; then the exchanges wait for it a while."""

Submit = Callable[[Contribution], "Future[Outcome]"]


@dataclass(frozen=True)
class _Start:
    """What a window begins with."""

    round: int
    tick: int
    anchor: AnchorCopy


@dataclass(frozen=True)
class _Waiting:
    """What is to be kept together."""

    payloads: tuple[Tensor, ...] = ()
    start: _Start | None = None
    """A window begins, before the payloads are kept."""
    over: threading.Event = field(default_factory=threading.Event)
    """They are kept, or nothing is kept any more."""


class Coordinator(Protocol):
    """The calls of `CoordinatorClient` that this needs."""

    def record_state(self, statement: str) -> None:
        """What model state this rank holds, signed."""


@dataclass(frozen=True)
class SigningIdentity:
    """In whose name statements are signed."""

    run: str
    rank: RankId
    signer: s.Signer


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
        """`warn` is told once if something cannot be kept. `patience`: seconds that an exchange
        waits for a store that is slow, before the keeping ends. `windows`: where payloads go that
        are removed one day; none: all stay in `store`."""
        self._patience, self._windows = patience, windows
        self._author, self._store = author, store
        self._coordinator, self._warn = coordinator, warn
        self._queue: queue.Queue[_Waiting] = queue.Queue(WAITING)
        self._broken = False
        self._removals = Removals(warn, "all payloads stay")
        self._kept = 0
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def commit(self, given: Contribution, payload: bytes | None) -> str:
        """The signed statement of what this rank will contribute; `given` has values.

        `payload`: SHA-256 of what will be sent, where it follows from the values alone.
        """
        assert given.values is not None
        author = self._author
        with tracing.span("commit", key=given.key.text):
            values = sha256_of(given.values)
            named = None if payload is None else payload.hex()
            said = commitment(author.run, author.rank, given.key, values, named)
            return author.signer.sign(said)

    def sign(self, key: ExchangeKey, attempt: int, digest: str) -> str:
        """The signed statement that this rank contributes a payload of this SHA-256."""
        author = self._author
        said = contribution(author.run, author.rank, key, attempt, digest)
        return author.signer.sign(said)

    def watching(self, submit: Submit) -> Submit:
        """`submit` whose outcomes' payloads are kept."""

        def submitted(given: Contribution) -> Future[Outcome]:
            future = submit(given)
            if given.key.kind == "outer":
                future.add_done_callback(self._done)
            return future

        return submitted

    def keep(self, payloads: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to keep `payloads`; what waits until they are kept, or given up.

        For what no other site has, before it counts: whoever replays the run needs it, also if this
        process is killed at once. Nobody waits for a store that is slow beyond the patience.
        """
        waiting = self._put(_Waiting(tuple(payloads)))

        def wait() -> None:
            with tracing.span("wait for the store"):
                while not self._broken and not waiting.over.wait(self._patience):
                    self._slow()

        return wait

    def begin_round(self, round_: int, tick: int, copy: Callable[[], AnchorCopy | None]) -> None:
        """A round begins, `tick` slots into the run; a window may begin with it.

        `copy`: what the rank holds of the anchor then; none if that is not the run's.
        """
        if self._windows is None or self._broken or not self._windows.due(round_):
            return
        with tracing.span("copy anchor", round=round_):
            anchor = copy()
        if anchor is None:
            return
        self._put(_Waiting(start=_Start(round_, tick, anchor)))
        # Payloads that were queued before the start lie in the window before, and a replay needs
        # them in this one. An exchange that ends from now on queues its payloads behind the start.
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

        Of `kind` "initial" the tensors are kept, in half the bytes if all their values are in bf16,
        as those of weights that began so; of "final" their digests alone, with those of the
        published folder's other `files` (SHA-256 by name). `rounded`: what a tensor was published
        as, if not as it is; its digests are signed, too. What cannot be kept or said is warned of.
        """
        try:
            with tracing.span("record state"):
                digests = []
                halved = kind == "initial" and all(map(_in_bf16, tensors.values()))
                for name, tensor in tensors.items():
                    digests.append(tensor_digest(name, tensor))
                    if halved:
                        rounded_bytes = tensor_bytes(round_to_bf16(tensor.detach().cpu()))
                        self._store.put_bf16(rounded_bytes, digests[-1].sha256)
                    elif kind == "initial":
                        self._store.put(tensor_bytes(tensor), digests[-1].sha256)
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

    def wait(self) -> None:
        """Return when all that is known so far is kept, or was warned of."""
        last, kept = self._put(_Waiting()), -1
        # As long as something is kept within the patience, the store is slow and not stuck.
        while not self._broken and not last.over.wait(self._patience):
            if self._kept == kept:
                self._slow()
            kept = self._kept

    def _done(self, future: Future[Outcome]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._put(_Waiting(future.result().payloads))

    def _put(self, waiting: _Waiting) -> _Waiting:
        while not self._broken:
            try:
                self._queue.put(waiting, timeout=self._patience)
                break
            except queue.Full:
                self._slow()
        return waiting

    def _slow(self) -> None:
        """Give up, unless the store waits for a full disk to be freed."""
        if self._store.room.awaited:
            return
        slow = f"{self._store.where}: has kept nothing for {self._patience:.0f} s"
        self._give_up(RecordError(slow))

    def _run(self) -> None:
        while True:
            waiting = self._queue.get()
            try:
                if not self._broken and waiting.start is not None:
                    self._begin_window(waiting.start)
                if not self._broken:
                    self._keep(waiting.payloads)
            except Exception as error:  # other people's storage, over a network
                self._give_up(error)
            finally:
                self._kept += 1
                waiting.over.set()

    def _keep(self, payloads: tuple[Tensor, ...]) -> None:
        with tracing.span("keep payloads", payloads=len(payloads)):
            for payload in payloads:
                self._put_bytes(tensor_bytes(payload))

    def _put_bytes(self, data: memoryview, digest: str | None = None) -> str:
        """Keep what stays as long as the newest window does, or for ever; its digest."""
        if self._windows is None:
            return self._store.put(data, digest)
        self._windows.add(len(data))
        return self._windows.current.put(data, digest)

    def _begin_window(self, start: _Start) -> None:
        """Keep and sign what a window begins with; then old windows go."""
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
    """Whether an fp32 tensor began as bf16, so that half of its bytes tell all of it."""
    return tensor.dtype == torch.float32 and is_bf16(tensor.detach().cpu())


def anchor_state(
    run: str,
    rank: RankId,
    round_: int,
    tick: int,
    landed: Sequence[int],
    subjects: Mapping[str, str],
) -> s.Statement:
    """What a rank signs of its anchor and outer momentum when a round begins."""
    return s.Statement(
        s.ANCHOR,
        subjects,
        {
            **s.round_of_rank(run, rank, round_, tick),
            "landed": list(landed),
        },
    )


MOMENTUM_OF = "outer-momentum/"
"""Begins the names of the outer momentum in the state that a run begins with, where it goes on from
another run; without it the momentum is zero."""


def listing_of(tensors: list[TensorDigest]) -> bytes:
    """The tensors of a state as they lie in the store: canonical JSON, in model order."""
    return rfc8785.dumps([each.to_json() for each in tensors])
