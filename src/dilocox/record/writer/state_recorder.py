"""What a rank does so that its rounds can be repeated: it keeps and signs the states they begin in.

A state is copied at the round's beginning (from a GPU beside the first step, which waits before it
changes anything) and hashed, kept and signed by a thread beside training.
No contribution is voted on before its round's state is signed and in the log, so that nobody can
choose a state that fits it afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dilocox.errors import DilocoxError, RecordError
from dilocox.outer.staging import Snapshot, snapshot
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Removals, Store
from dilocox.record.log.digests import tensor_bytes
from dilocox.record.log.round_document import Document, checksum, fingerprint, steps_to_bytes
from dilocox.record.writer.rank_recorder import Coordinator, SigningIdentity
from dilocox.utils import tracing
from dilocox.utils.storage import run_in_thread

log = logging.getLogger(__name__)

Capture = Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
"""Tensors (not copies) and numbers of this rank's state."""


class RoundWatch(Protocol):
    """Who looks on while a rank trains its rounds."""

    def boundary(self, round_: int, tick: int, trains: bool, capture: Capture) -> None:
        """A round is about to begin, `tick` slots into the run; `trains`: with inner steps. The
        flush has none, and its state is kept whichever round it is."""

    def step(self, numbers: Tensor, parameters: Iterable[Tensor]) -> None:
        """An inner step was taken: float64 [loss, norm], and this rank's parameters after it."""

    def wait(self) -> None:
        """Return when all that is known so far is kept, or was warned of."""


@dataclass(frozen=True)
class RecordingPolicy:
    """How a rank computes and what it shows."""

    every: int
    """Rounds from one state that is kept to the next."""
    keep: int
    """How many such rounds have their states in the store, the newest; 0: all."""
    private: bool
    """The site trains on text of its own: its states are signed, not kept."""
    facts: Mapping[str, Any]
    """The determinism class."""
    replaced: Sequence[str] = ()
    """See `Document`."""


class InnerRecord:
    """One rank's `RoundWatch` in a run that is recorded."""

    def __init__(
        self,
        author: SigningIdentity,
        manner: RecordingPolicy,
        store: Store,
        coordinator: Coordinator,
        warn: Callable[[str], None],
        patience: float,
    ) -> None:
        """`warn` is told once if something cannot be kept or said. `patience`: seconds that a round
        waits for a store that is slow, before the keeping ends."""
        self._patience = patience
        self._author, self._manner = author, manner
        self._store, self._coordinator, self._warn = store, coordinator, warn
        self._steps: list[tuple[Tensor, Tensor]] | None = None
        self._keeping: Future[None] | None = None
        self._signed = threading.Event()
        self._signed.set()
        self._broken = False
        self._removals = Removals(warn, "all states are kept")

    def boundary(self, round_: int, tick: int, trains: bool, capture: Capture) -> None:
        """See `RoundWatch`. Waits for the state before, of which there is one copy at a time."""
        steps, self._steps = self._steps, None
        begins = not trains or round_ % self._manner.every == 0
        if self._broken or (steps is None and not begins) or not self._is_kept():
            return
        with tracing.span("copy round state", round=round_):
            tensors, state = capture()
            copies = snapshot(tensors)
        if begins:
            self._steps = []
        self._signed.clear()
        self._keeping = run_in_thread(
            lambda: self._keep(round_, tick, begins, copies, state, steps)
        )

    def step(self, numbers: Tensor, parameters: Iterable[Tensor]) -> None:
        """See `RoundWatch`."""
        if self._steps is not None:
            self._steps.append((numbers, checksum(parameters)))

    def wait(self) -> None:
        """See `RoundWatch`."""
        self._is_kept()

    def wait_signed(self) -> None:
        """Return when the newest state is signed and in the log, or that was warned of."""
        while not self._signed.wait(self._patience):
            if not self._store.room.awaited:
                self._too_slow()

    def _is_kept(self) -> bool:
        """Wait until the state before is kept; whether it was in time."""
        while self._keeping is not None:
            try:
                self._keeping.result(self._patience)
                break
            except FutureTimeoutError:
                if not self._store.room.awaited:
                    self._too_slow()
                    return False
        return True

    def _too_slow(self) -> None:
        slow = f"{self._store.where}: has not kept a state for {self._patience:.0f} s"
        self._give_up(RecordError(slow))
        self._signed.set()

    def _keep(
        self,
        round_: int,
        tick: int,
        begins: bool,
        copies: Snapshot,
        state: Mapping[str, Any],
        steps: list[tuple[Tensor, Tensor]] | None,
    ) -> None:
        manner = self._manner
        served = "no" if not begins else "private" if manner.private else "yes"
        try:
            tensors = copies.tensors()
            with tracing.span("sign round state", round=round_):
                document = Document.of(tensors, state, manner.facts, manner.replaced)
                self._sign(round_, tick, served, document, steps)
            self._signed.set()
            if served == "yes":
                with tracing.span("keep round state", round=round_):
                    place = self._store.states(round_)
                    for each in document.tensors:
                        place.put(tensor_bytes(tensors[each.name]), each.sha256)
            if begins and manner.keep:
                # One more than asked for: the last of them may just be on its way to somebody.
                oldest = (round_ // manner.every - manner.keep) * manner.every
                self._removals.attempt(lambda: self._store.drop_states(oldest))
        except Exception as error:  # other people's storage, over a network
            self._give_up(error)
        finally:
            self._signed.set()

    def _sign(
        self,
        round_: int,
        tick: int,
        served: str,
        document: Document,
        steps: list[tuple[Tensor, Tensor]] | None,
    ) -> None:
        author = self._author
        subjects = {"state": document.root, "document": self._store.put(document.to_bytes())}
        if steps is not None:
            found = [fingerprint(numbers, total) for numbers, total in steps]
            subjects["steps"] = self._store.put(steps_to_bytes(found))
        said = round_state(author.run, author.rank, round_, tick, served, subjects)
        self._coordinator.record_state(author.signer.sign(said))

    def _give_up(self, error: Exception) -> None:
        log.error("record: %s", error)
        if not self._broken:
            self._broken = True
            with contextlib.suppress(DilocoxError):
                self._warn(f"record: {error}; the run goes on, audits of its rounds will fail")


def round_state(
    run: str,
    rank: Any,
    round_: int,
    tick: int,
    served: str,
    subjects: Mapping[str, str],
) -> s.Statement:
    """What a rank signs of the state in which it begins a round."""
    return s.Statement(
        s.ROUND,
        subjects,
        {
            **s.round_of_rank(run, rank, round_, tick),
            "served": served,
        },
    )
