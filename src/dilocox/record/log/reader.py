"""Opens the lines of a log and checks their signatures, a long log's on all cores.

Run as a module, it is one of the workers: batches of lines come in on its standard input, and on
its standard output goes what became of each. Both are in the marshal format, which only this
process and its own workers speak.
"""

from __future__ import annotations

import contextlib
import itertools
import marshal
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple

from dilocox.errors import RecordError
from dilocox.record.log import statements as s

BATCH = 1000
"""Lines that a worker gets at once."""
FEW = 6 * BATCH
"""So many are opened here: a worker takes half a second to start."""
BYTES = 8 * 2**20
"""A batch is no longer, but for its last line: a stranger's log may have long ones."""
MOST_WORKERS = 6
"""More open lines faster than one process can judge what they say."""
_LENGTH = 4

Raw = tuple[str, dict[str, str], dict[str, Any], str] | str
"""Type, subjects and predicate of a statement, and who has signed it; or why a line is none."""


class Line(NamedTuple):
    """A line of a log, opened."""

    text: str
    statement: s.Statement | None
    """None: the line is no statement."""
    signer: str
    """The key, 64 hex digits, that has signed; empty: none has. Of a statement of an unknown type
    nobody looks at the signature."""
    fault: str
    """Why the line is no statement."""


def read_lines(entries: Iterable[str], workers: int | None = None) -> Generator[Line, None, None]:
    """All lines in their order, opened.

    `workers`: processes; None: one for each core, if there are several. An error that `entries`
    raises comes after the lines before it. Whoever does not go to the end closes the iterator.
    """
    most = min(_cores(), MOST_WORKERS) if workers is None else workers
    source = iter(entries)
    first, error = _next(source, FEW) if most else ([], None)
    if error is not None or not first or (len(first) < FEW and _size(first) < BYTES):
        yield from map(_here, itertools.chain(first, source))
        if error is not None:
            raise error
        return
    pool = _Pool(most)
    try:
        yield from pool.lines(itertools.chain(first, source))
    finally:
        pool.close()


def _next(source: Iterator[str], most: int) -> tuple[list[str], Exception | None]:
    """The next lines, so many or the bytes of a batch, and the error that has ended them."""
    found: list[str] = []
    size = 0
    try:
        # Line by line: what comes before an error is not lost.
        for text in itertools.islice(source, most):
            found.append(text)
            size += len(text)
            if size >= BYTES:
                break
    except Exception as error:
        return found, error
    return found, None


def _size(lines: list[str]) -> int:
    return sum(map(len, lines))


def _cores() -> int:
    """Cores for workers; 0: this process has a single one."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return found if found > 1 else 0


def _here(text: str) -> Line:
    return _line(text, _opened(text))


def _line(text: str, raw: Raw) -> Line:
    if isinstance(raw, str):
        return Line(text, None, "", raw)
    return Line(text, s.Statement(*raw[:3]), raw[3], "")


def _opened(text: str) -> Raw:
    try:
        statement, envelope = s.opened(text)
    except RecordError as error:
        return str(error)
    signer = ""
    if statement.known:
        (signer,) = envelope.signatures
        try:
            s.check_signature(envelope, signer)
        except RecordError:
            signer = ""
    return statement.kind, dict(statement.subjects), dict(statement.predicate), signer


class _Pool:
    """Worker processes, each with a thread here that hands it batches."""

    def __init__(self, workers: int) -> None:
        self._most = workers
        self._threads = ThreadPoolExecutor(workers, "reading")
        self._own = threading.local()
        self.processes: list[subprocess.Popen[bytes]] = []

    def lines(self, entries: Iterator[str]) -> Iterator[Line]:
        """See `read_lines`."""
        pending: deque[tuple[list[str], Future[list[Raw]]]] = deque()
        broken: Exception | None = None
        while broken is None:
            batch, broken = _next(entries, BATCH)
            if not batch:
                break
            pending.append((batch, self._threads.submit(self._batch, batch)))
            # A log is larger than memory.
            if len(pending) > 2 * self._most:
                yield from _done(*pending.popleft())
        while pending:
            yield from _done(*pending.popleft())
        if broken is not None:
            raise broken

    def close(self) -> None:
        """End the workers."""
        # First: a thread may be starting its worker just now.
        self._threads.shutdown(cancel_futures=True)
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]

    def _batch(self, batch: list[str]) -> list[Raw]:
        """In a thread, which has a worker of its own. What no worker does is done here."""
        try:
            process = self._worker()
            assert process.stdin is not None
            assert process.stdout is not None
            _send(process.stdin, marshal.dumps(batch))
            answer = _received(process.stdout)
            if answer is not None:
                found: list[Raw] = marshal.loads(answer)  # noqa: S302 - of our own worker
                return found
        except (OSError, ValueError, EOFError):
            pass  # it could not be started, or was killed: all the same, this is opened
        return [_opened(text) for text in batch]

    def _worker(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._own, "process"):
            self._own.process = subprocess.Popen(  # noqa: S603 - this very module
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self.processes.append(self._own.process)
        process: subprocess.Popen[bytes] = self._own.process
        return process


def _done(batch: list[str], future: Future[list[Raw]]) -> Iterator[Line]:
    return map(_line, batch, future.result())


def _send(file: IO[bytes], body: bytes) -> None:
    file.write(len(body).to_bytes(_LENGTH, "little"))
    file.write(body)
    file.flush()


def _received(file: IO[bytes]) -> bytes | None:
    """None: there is no more."""
    header = file.read(_LENGTH)
    body = file.read(int.from_bytes(header, "little"))
    whole = len(header) == _LENGTH and len(body) == int.from_bytes(header, "little")
    return body if whole else None


def main() -> None:
    """One worker. It ends without an answer if one has no marshal form: nested too deeply."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while (body := _received(source)) is not None:
        batch: list[str] = marshal.loads(body)  # noqa: S302 - of the process that has started this
        try:
            answer = marshal.dumps([_opened(text) for text in batch])
        except ValueError:
            return
        _send(target, answer)


if __name__ == "__main__":
    # The process that has started this is interrupted, too, and says so.
    with contextlib.suppress(KeyboardInterrupt):
        main()
