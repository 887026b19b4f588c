"""The threads of a rank in which exchanges run beside the training.

Exchanges use the link in turn, so that the first is there first. What needs no link is done
meanwhile: the next one is encoded, the one before is voted on and averaged. An exchange of several
messages has its turn for the first; between its messages the next one's travel.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from dilocox.coordinator.protocol.schedule import AT_ONCE
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.transport.exchange import ExchangeBackend, exchange
from dilocox.transport.link.times import LinkTimes
from dilocox.utils import tracing


class OrderedLock:
    """In what order exchanges, numbered from 0, use the link. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._passed: set[int] = set()
        self._failure: BaseException | None = None

    def wait_for(self, number: int) -> None:
        """Wait until all before `number` have passed. Raises what `fail` was told."""
        with self._changed:
            while self._next < number and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def pass_on(self, number: int) -> None:
        """Exchange `number` needs the link no more."""
        with self._changed:
            if number >= self._next:
                self._passed.add(number)
            while self._next in self._passed:
                self._passed.remove(self._next)
                self._next += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing comes of those that wait."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """What `fail` was told first."""
        return self._failure


class LinkSlot:
    """The turn of one exchange."""

    def __init__(self, turns: OrderedLock, number: int) -> None:
        self._turns = turns
        self._number = number
        self.waited = 0.0
        """Seconds spent in `take`."""

    def take(self) -> None:
        """Wait for the exchanges before this one. Raises what made one of them fail."""
        start = time.monotonic()
        with tracing.span("wait for the link"):
            self._turns.wait_for(self._number)
        self.waited += time.monotonic() - start

    def pass_on(self) -> None:
        """Let the next one have the link."""
        self._turns.pass_on(self._number)


class ExchangeWorker:
    """Carries contributions in the order in which they are handed in.

    All sites hand in the same keys in the same order, so nobody waits for a peer that waits for
    him. An exchange that fails ends the worker: later ones fail with the same error.
    """

    def __init__(
        self,
        ballot: ExchangeBackend,
        me: str,
        prepare: Callable[[], None] | None = None,
        times: LinkTimes | None = None,
    ) -> None:
        """`prepare` is called first in every thread; `times` limits transfers."""
        self._ballot = ballot
        self._me = me
        self._prepare, self._times = prepare, times
        self._queue: queue.Queue[tuple[Contribution, Future[Outcome]] | None] = queue.Queue()
        self._turns = OrderedLock()
        self._count = 0
        self._counting = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name="exchange", daemon=True) for _ in range(AT_ONCE)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, contribution: Contribution) -> Future[Outcome]:
        """Start an exchange as soon as those before it leave room."""
        future: Future[Outcome] = Future()
        self._queue.put((contribution, future))
        return future

    def close(self, timeout: float = 5.0) -> None:
        """End after the exchanges under way; those not begun stay unanswered."""
        end = time.monotonic() + timeout
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        if self._prepare:
            self._prepare()
        while True:
            with self._counting:
                item = self._queue.get()
                number = self._count
                self._count += 1
            if item is None:
                return
            contribution, future = item
            turn = LinkSlot(self._turns, number)
            try:
                if self._turns.failure is not None:
                    raise self._turns.failure
                future.set_result(self._carry(contribution, turn))
            except BaseException as error:
                self._turns.fail(error)
                future.set_exception(error)
            finally:
                turn.pass_on()

    def _carry(self, given: Contribution, turn: LinkSlot) -> Outcome:
        """Beside training on its device, too: after what it is given, and marking what it gives."""
        staging = given.staging
        with staging.beside():
            if given.ready is not None:
                given.ready.wait()
            staging.use(given.values, given.warm)
            outcome = exchange(self._ballot, self._me, given, turn, self._times)
            return replace(outcome, ready=staging.mark())
