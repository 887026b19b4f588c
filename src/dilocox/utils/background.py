"""A queue for network calls that run in the background while training goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundQueue:
    """Queue with one worker thread. Calls run one after another, in the order of submission.

    After the first failure no further call runs. The futures of all later calls, and `wait`, then
    raise the error of the failed call.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Append `call` to the queue. Returns a future for its result or error."""
        if self._thread is None:
            # The thread starts here and not earlier, because a process that forks must be
            # single-threaded.
            self._thread = threading.Thread(target=self._run, name="background", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._last = future
        self._queue.put((call, future))
        return future

    def wait(self) -> None:
        """Return when all submitted calls are done. Raises the error of the first failed call."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Let the thread end after all submitted calls. Calls that are submitted later never run.

        Does not wait.
        """
        self._queue.put(None)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for the next call and run it; return False if there are no more calls.

        A thread that waits has no reference to its last call, whose data are then free.
        """
        item = self._queue.get()
        if item is None:
            return False
        call, future = item
        if self._failure is None:
            try:
                future.set_result(call())
                return True
            except BaseException as error:
                self._failure = error
        future.set_exception(self._failure)
        return True
