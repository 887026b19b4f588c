"""Parses the lines of a log and checks their signatures; for a long log, on all cores.

Run as a program, this module is one worker process. The worker reads batches of lines from standard
input, and writes the parsed lines to standard output. Both are in the marshal format, which is safe
because only a process and its own workers exchange it.
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
"""Lines below which no worker is started, because a worker takes half a second to start."""
BYTES = 8 * 2**20
"""Characters after which a batch ends early: a stranger's log may have long lines."""
MOST_WORKERS = 6
"""Maximum number of workers. More would parse faster than one process judges statements."""
_LENGTH = 4

Raw = tuple[str, dict[str, str], dict[str, Any], str] | str
"""(type, subjects, predicate, signing key) of a statement, or the reason why a line is none."""


class Line(NamedTuple):
    """A parsed line of a log."""

    text: str
    statement: s.Statement | None
    """None if the line is not a statement."""
    signer: str
    """The key, 64 hex digits, that has signed; empty if the signature is wrong. Signatures of
    unknown types are not checked, and `signer` is empty."""
    fault: str
    """Reason why the line is not a statement; empty if it is one."""


def read_lines(entries: Iterable[str], workers: int | None = None) -> Generator[Line, None, None]:
    """Parse all lines, in order.

    `workers`: number of worker processes; None: one per core, if there are several cores. An
    exception of `entries` is raised after the lines before it. A caller that does not read to the
    end must close the generator.
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
    """Take the next lines, up to `most` lines or `BYTES`, and the error that ended them, if any."""
    found: list[str] = []
    size = 0
    try:
        # Line by line, so that lines before an error are not lost.
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
    """Return the number of cores for workers; 0 if this process has a single core."""
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
    """A pool of worker processes, each fed by a thread of this process."""

    def __init__(self, workers: int) -> None:
        self._most = workers
        self._threads = ThreadPoolExecutor(workers, "reading")
        self._own = threading.local()
        self.processes: list[subprocess.Popen[bytes]] = []

    def lines(self, entries: Iterator[str]) -> Iterator[Line]:
        """Parse all lines, in order; see `read_lines`."""
        pending: deque[tuple[list[str], Future[list[Raw]]]] = deque()
        broken: Exception | None = None
        while broken is None:
            batch, broken = _next(entries, BATCH)
            if not batch:
                break
            pending.append((batch, self._threads.submit(self._batch, batch)))
            # Limit the lines in memory: a log may be larger than memory.
            if len(pending) > 2 * self._most:
                yield from _done(*pending.popleft())
        while pending:
            yield from _done(*pending.popleft())
        if broken is not None:
            raise broken

    def close(self) -> None:
        """End the threads and the workers."""
        # Threads first: one of them may be starting its worker just now.
        self._threads.shutdown(cancel_futures=True)
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]

    def _batch(self, batch: list[str]) -> list[Raw]:
        """Parse a batch in this thread's own worker; parse it here if the worker fails."""
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
            pass  # the worker could not be started, or was killed: parse the batch here
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
    """Receive the next message; None at the end."""
    header = file.read(_LENGTH)
    body = file.read(int.from_bytes(header, "little"))
    whole = len(header) == _LENGTH and len(body) == int.from_bytes(header, "little")
    return body if whole else None


def main() -> None:
    """Run one worker. A statement that is too deeply nested for marshal ends it, unanswered."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while (body := _received(source)) is not None:
        batch: list[str] = marshal.loads(body)  # noqa: S302 - of the process that has started this
        try:
            answer = marshal.dumps([_opened(text) for text in batch])
        except ValueError:
            return
        _send(target, answer)


if __name__ == "__main__":
    # The parent process gets the same interrupt and reports it.
    with contextlib.suppress(KeyboardInterrupt):
        main()
