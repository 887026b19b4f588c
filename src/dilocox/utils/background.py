"""Calls over the network that training does not wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundQueue:
    """Runs calls in a thread of its own, one after the other, in the order given.

    The first that fails is the last that is run: later ones, and `wait`, raise its error. So
    whoever asks learns of it at the latest with the next errand.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` when those before it are done; what it returns or raises."""
        if self._thread is None:
            # Not earlier: a process that still forks must have one thread.
            self._thread = threading.Thread(target=self._run, name="background", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._last = future
        self._queue.put((call, future))
        return future

    def wait(self) -> None:
        """Return when everything that was asked for is done. Raises the error of what failed."""
        if self._last is not None:
            self._last.result()

    def _run(self) -> None:
        failure: BaseException | None = None
        while True:
            call, future = self._queue.get()
            if failure is None:
                try:
                    future.set_result(call())
                    continue
                except BaseException as error:
                    failure = error
            future.set_exception(failure)
