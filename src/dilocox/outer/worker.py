"""The thread of a rank in which exchanges run beside the training, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from dilocox.outer.exchange import Ballot, Contribution, Outcome, exchange


class ExchangeWorker:
    """Carries contributions in the order in which they are handed in.

    All sites hand in the same keys in the same order, so nobody waits for a peer that waits for
    him. An exchange that fails ends the worker: later ones fail with the same error.
    """

    def __init__(self, ballot: Ballot, me: str, prepare: Callable[[], None] | None = None) -> None:
        self._ballot = ballot
        self._me = me
        self._prepare = prepare
        self._queue: queue.Queue[tuple[Contribution, Future[Outcome]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def submit(self, contribution: Contribution) -> Future[Outcome]:
        """Start an exchange as soon as those before it are through."""
        future: Future[Outcome] = Future()
        self._queue.put((contribution, future))
        return future

    def close(self, timeout: float = 5.0) -> None:
        """End after the exchange under way; those not begun stay unanswered."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        if self._prepare:
            self._prepare()
        failure: BaseException | None = None
        while True:
            item = self._queue.get()
            if item is None:
                return
            contribution, future = item
            if failure is None:
                try:
                    future.set_result(exchange(self._ballot, self._me, contribution))
                    continue
                except BaseException as error:
                    failure = error
            future.set_exception(failure)
