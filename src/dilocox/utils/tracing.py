"""Timeline of a process for `--trace`: spans of time, and marks. Without `--trace` it does nothing.

    with tracing.span("encode", codec="int4") as at:
        ...
        at.note(bytes=payload.numel())

Like a log, the timeline is global to the process: any code may open a span, and need not know
whether the timeline is recorded. Spans of one thread are nested, since each span is a `with` block.
The file has one line of JSON per span; `dilocox.utils.chrome_trace` makes a Chrome trace from it.
Spans that are still open when the recording ends are left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

log = logging.getLogger(__name__)

KEPT_EVENTS = 256
"""Number of events that are buffered and written together. A killed process loses up to as many."""

Event = tuple[str, int, int, int, int, "dict[str, Any]"]
"""(name, thread number, begin in ns, length in ns, CPU time of the thread in ns, arguments)."""
MARK = -1
"""Length of an event that is a mark. The CPU time of a mark is that of the whole process so far."""


class Span(Protocol):
    """A span of time: it begins on entering the context and ends on leaving it."""

    def __enter__(self) -> Span: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def note(self, **arguments: Any) -> None:
        """Add arguments that were not known when the span began."""


class _Nothing:
    """The span of a process that records nothing."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def note(self, **_: Any) -> None:
        return


class _Timed:
    __slots__ = ("_arguments", "_began", "_name", "_recorder", "_work")

    def __init__(self, recorder: _Tracer, name: str, arguments: dict[str, Any]) -> None:
        self._recorder = recorder
        self._name = name
        self._arguments = arguments

    def __enter__(self) -> _Timed:
        self._work = time.thread_time_ns()
        self._began = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        length = time.monotonic_ns() - self._began
        work = time.thread_time_ns() - self._work
        self._recorder.add(self._name, self._began, length, work, self._arguments)

    def note(self, **arguments: Any) -> None:
        self._arguments.update(arguments)


class _Tracer:
    """Writes the events of all threads to one file. If a write fails, only the recording ends."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._threads: list[str] = []
        self._own = threading.local()
        # With the wall clock, timelines of several machines can be aligned.
        self._line({"clock": [time.time_ns(), time.monotonic_ns()]})

    def add(self, name: str, began: int, length: int, work: int, arguments: dict[str, Any]) -> None:
        number = getattr(self._own, "number", None)
        with self._lock:
            if number is None:
                # Unlike a thread's identifier, this number is never reused after the thread ends.
                number = self._own.number = len(self._threads)
                self._threads.append(threading.current_thread().name)
                self._line({"thread": number, "name": self._threads[number]})
            self._events.append((name, number, began, length, work, arguments))
            if len(self._events) >= KEPT_EVENTS:
                self._write()

    def close(self) -> None:
        with self._lock:
            self._write()
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self) -> None:
        events, self._events = self._events, []
        self._line(*events)

    def _line(self, *items: Any) -> None:
        if self._file.closed:
            return
        try:
            self._file.write("".join(json.dumps(item) + "\n" for item in items))
            self._file.flush()
        except OSError as error:
            log.warning("recording of the timeline stopped (%s)", error)
            with contextlib.suppress(OSError):
                self._file.close()


_NOTHING = _Nothing()
_recorder: _Tracer | None = None


def span(name: str, **arguments: Any) -> Span:
    """Returns a span that records the time from entering to leaving its `with` block.

    `arguments` are numbers and short strings that JSON can hold; their names contain the units.
    """
    recorder = _recorder
    return _NOTHING if recorder is None else _Timed(recorder, name, arguments)


def recording_now() -> bool:
    """Returns whether this process's timeline is being recorded."""
    return _recorder is not None


def mark(name: str, **arguments: Any) -> None:
    """Record a mark: a moment that concerns the whole process, such as the start of a round."""
    if _recorder is not None:
        _recorder.add(name, time.monotonic_ns(), MARK, time.process_time_ns(), arguments)


@contextlib.contextmanager
def recording(path: Path | None) -> Iterator[None]:
    """Within this context, record this process's timeline to `path`; if None, record nothing.

    An existing file at `path` is replaced. Raises `OSError` if the file cannot be created.
    """
    global _recorder
    if path is None:
        yield
        return
    _recorder = recorder = _Tracer(path)
    try:
        yield
    finally:
        _recorder = None
        recorder.close()
