"""Stores and signs the states in which a rank begins its rounds, so that audits can repeat them.

A state is copied when the round begins. From a GPU the copy runs beside the first step, which waits
for the copy before it changes anything. A background thread hashes, stores and signs the copy. A
rank votes on a contribution only after the round's state is signed and in the log. So no site can
choose a state afterwards that fits its contribution.
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
    """Observer of a rank's rounds and inner steps."""

    def boundary(self, round_: int, tick: int, trains: bool, capture: Capture) -> None:
        """Called before a round begins.

        Args:
            round_: The round that is about to begin.
            tick: Slots of the run that have ended.
            trains: True if the round has inner steps. The flush has none; its state is stored
                whatever its round number is.
            capture: Returns the rank's tensors and numbers.
        """

    def step(self, numbers: Tensor, parameters: Iterable[Tensor]) -> None:
        """Called after an inner step with float64 [loss, norm] and this rank's parameters."""

    def wait(self) -> None:
        """Block until all states are stored, or until a failure has been reported."""


@dataclass(frozen=True)
class RecordingPolicy:
    """Which states of a rank are stored, and the facts that their documents name."""

    every: int
    """Rounds between two stored states."""
    keep: int
    """Number of newest such rounds whose states stay in the store; 0: all."""
    private: bool
    """True if the site trains on text of its own: its states are signed but not stored."""
    facts: Mapping[str, Any]
    """The determinism class."""
    replaced: Sequence[str] = ()
    """Parts of dilocox that the site's program replaces; see `Document`."""


class InnerRecord:
    """The `RoundWatch` of one rank in a recorded run."""

    def __init__(
        self,
        author: SigningIdentity,
        manner: RecordingPolicy,
        store: Store,
        coordinator: Coordinator,
        warn: Callable[[str], None],
        patience: float,
    ) -> None:
        """Create the observer of one rank.

        Args:
            author: The identity that signs.
            manner: Which states are stored, and the facts of their documents.
            store: Store of the record.
            coordinator: Takes signed statements.
            warn: Called once with one line if a state cannot be stored or signed.
            patience: Seconds that a round waits for a slow store before the rank stops storing.
        """
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
        """See `RoundWatch`. Waits until the previous state is stored: only one copy may exist."""
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
        """Block until the newest state is signed and in the log, or a failure has been reported."""
        while not self._signed.wait(self._patience):
            if not self._store.room.awaited:
                self._too_slow()

    def _is_kept(self) -> bool:
        """Wait until the previous state is stored; False if the store was too slow."""
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
                # Keep one state more than asked for: an auditor may be reading the oldest one.
                oldest = (round_ // manner.every - manner.keep) * manner.every
                self._removals.attempt(lambda: self._store.drop_states(oldest))
        except Exception as error:  # remote storage may raise any error
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
    """Build a rank's statement of the state in which it begins a round.

    Args:
        run: Id of the run.
        rank: The rank, with `site`, `stage` and `shard`.
        round_: The round that is about to begin.
        tick: Slots of the run that have ended.
        served: See `dilocox.record.log.state_statements.RoundState`.
        subjects: `state`, `document` and possibly `steps`, SHA-256 in hex.
    """
    return s.Statement(
        s.ROUND,
        subjects,
        {
            **s.round_of_rank(run, rank, round_, tick),
            "served": served,
        },
    )
