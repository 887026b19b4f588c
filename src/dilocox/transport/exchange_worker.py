"""Background threads of a rank that run exchanges while training goes on.

Exchanges send their first message in submission order, so that the oldest exchange arrives first.
Work that needs no link overlaps with transfers: one thread encodes the next exchange while another
votes on the previous exchange and averages it. An exchange of several messages waits for its turn
only before the first message. Between its messages the messages of the next exchange may travel.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from dilocox.coordinator.protocol.round_plan import AT_ONCE
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.transport.exchange import ExchangeBackend, exchange
from dilocox.transport.link.times import LinkTimes
from dilocox.utils import tracing


class OrderedLock:
    """Lock that exchanges acquire in the order of their numbers, which start at 0. Thread-safe.

    The lock guards the start of transfers on the link between sites.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._passed: set[int] = set()
        self._failure: BaseException | None = None

    def wait_for(self, number: int) -> None:
        """Block until all exchanges before `number` have released the lock.

        Raises the exception that was given to `fail`.
        """
        with self._changed:
            while self._next < number and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def pass_on(self, number: int) -> None:
        """Release the lock for exchange `number`. A repeated release has no effect."""
        with self._changed:
            if number >= self._next:
                self._passed.add(number)
            while self._next in self._passed:
                self._passed.remove(self._next)
                self._next += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make every present and future `wait_for` raise `error`; the first error stays."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """The first exception given to `fail`, or None."""
        return self._failure


class LinkSlot:
    """The place of one exchange in the `OrderedLock`: a `dilocox.transport.attempt.Turn`."""

    def __init__(self, turns: OrderedLock, number: int) -> None:
        self._turns = turns
        self._number = number
        self.waited = 0.0
        """Seconds spent in `take`, summed over calls."""

    def take(self) -> None:
        """Block until the exchanges before this one have released the link.

        Raises the exception of the first exchange that failed.
        """
        start = time.monotonic()
        with tracing.span("wait for the link"):
            self._turns.wait_for(self._number)
        self.waited += time.monotonic() - start

    def pass_on(self) -> None:
        """Release the link to the next exchange."""
        self._turns.pass_on(self._number)


class ExchangeWorker:
    """Runs exchanges in background threads, in the order in which contributions are submitted.

    All sites submit the same keys in the same order, so two sites cannot deadlock by waiting for
    each other. After the first failed exchange, all later exchanges fail with the same exception.
    """

    def __init__(
        self,
        ballot: ExchangeBackend,
        me: str,
        prepare: Callable[[], None] | None = None,
        times: LinkTimes | None = None,
    ) -> None:
        """Start the threads.

        Args:
            ballot: The coordinator, as exchanges use it.
            me: Name of this site.
            prepare: Called once at the start of every thread.
            times: Durations of earlier transfers, which limit new transfers. None: no such limit.
        """
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
        """Queue an exchange; its outcome, or its exception, arrives in the returned future."""
        future: Future[Outcome] = Future()
        self._queue.put((contribution, future))
        return future

    def close(self, timeout: float = 5.0) -> None:
        """Stop the threads once all submitted exchanges have run; wait at most `timeout` seconds.

        An exchange submitted after this call never runs: its future is never resolved.
        """
        end = time.monotonic() + timeout
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        if self._prepare:
            self._prepare()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for the next exchange and run it; return False if there are no more exchanges.

        A thread that waits has no reference to its last exchange, whose tensors are then free.
        """
        with self._counting:
            item = self._queue.get()
            number = self._count
            self._count += 1
        if item is None:
            return False
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
        return True

    def _carry(self, given: Contribution, turn: LinkSlot) -> Outcome:
        """Run one exchange on a device stream of its own.

        The stream first waits for the event `given.ready`. The outcome gets an event that marks the
        end of this exchange's work on the device.
        """
        staging = given.staging
        with staging.beside():
            if given.ready is not None:
                given.ready.wait()
            staging.use(given.values, given.warm)
            outcome = exchange(self._ballot, self._me, given, turn, self._times)
            return replace(outcome, ready=staging.mark())
