"""Checks many signatures of a log on all cores.

Run as a module, it is one of the workers: batches come in on its standard input, and on its
standard output goes the number of the first bad signature of each, or -1.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

BATCH = 2000
"""Signatures that a worker gets at once."""
FEW = 3 * BATCH
"""So many are checked here: a worker takes half a second to start."""
MOST_WORKERS = 16
_KEY, _SIGNATURE, _LENGTH = 32, 64, 4

Item = tuple[bytes, bytes, bytes]
"""Public key (32 bytes), signature (64 bytes), what was signed."""
Label = tuple[int, str]
"""Number of a statement, and the public key, hex, that had to sign it."""


def first_bad(items: list[Item]) -> int:
    """Number of the first item whose signature is not one of its key; -1 if all are right."""
    keys: dict[bytes, Ed25519PublicKey] = {}
    for number, (public, signature, data) in enumerate(items):
        try:
            key = keys.get(public)
            if key is None:
                key = keys[public] = Ed25519PublicKey.from_public_bytes(public)
            key.verify(signature, data)
        except (InvalidSignature, ValueError):
            return number
    return -1


class SignatureChecks:
    """Signatures to check, in the order of their statements."""

    def __init__(self, workers: int | None = None) -> None:
        """`workers`: processes; none: one for each core but this one."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._most = min(cores - 1, MOST_WORKERS) if workers is None else workers
        self._items: list[Item] = []
        self._labels: list[Label] = []
        self._pending: deque[tuple[list[Label], Future[int]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def add(self, number: int, public: str, signature: str, data: bytes) -> None:
        """Check later whether `signature` of `data` is one of the key `public` (both hex);
        `number`: of the statement."""
        try:
            item = bytes.fromhex(public), bytes.fromhex(signature), data
        except ValueError:
            item = b"", b"", data
        self._items.append(item)
        self._labels.append((number, public))
        enough = FEW if self._pool is None else BATCH
        if self._most > 0 and len(self._items) >= enough:
            self._hand_out()

    def bad(self) -> Label | None:
        """The first signature that is wrong, in the order of `add`; None: all are right. Waits for
        all that are not checked yet."""
        found = None
        while self._pending and found is None:
            found = _named(*self._pending.popleft())
        if found is None:
            wrong = first_bad(self._items)
            found = None if wrong < 0 else self._labels[wrong]
        self._items, self._labels = [], []
        return found

    def close(self) -> None:
        """End the workers."""
        # First: a thread may be starting its worker just now.
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]

    def _hand_out(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, "signatures")
        for start in range(0, len(self._items), BATCH):
            batch = self._items[start : start + BATCH]
            labels = self._labels[start : start + BATCH]
            self._pending.append((labels, self._pool.submit(self._checked, batch)))
        self._items, self._labels = [], []
        # A log is read faster than it is checked, and is larger than memory.
        while len(self._pending) > 2 * self._most + 2:
            if _named(*self._pending[0]) is not None:
                return  # `bad` will say so
            self._pending.popleft()

    def _checked(self, items: list[Item]) -> int:
        """In a thread, which has a worker of its own. What no worker does is done here."""
        if any((len(p), len(s)) != (_KEY, _SIGNATURE) for p, s, _ in items):
            return first_bad(items)
        try:
            process = self._worker()
            assert process.stdin is not None
            assert process.stdout is not None
            _send(process.stdin, items)
            answer = process.stdout.read(_LENGTH)
            if len(answer) == _LENGTH:
                return int.from_bytes(answer, "little", signed=True)
        except (OSError, ValueError):
            pass  # it could not be started, or was killed: all the same, this is checked
        return first_bad(items)

    def _worker(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._own, "process"):
            self._own.process = subprocess.Popen(  # noqa: S603 - this very module
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._processes.append(self._own.process)
        process: subprocess.Popen[bytes] = self._own.process
        return process


def _named(labels: list[Label], future: Future[int]) -> Label | None:
    wrong = future.result()
    return None if wrong < 0 else labels[wrong]


def _send(file: IO[bytes], items: list[Item]) -> None:
    parts = [
        part
        for public, signature, data in items
        for part in (public, signature, len(data).to_bytes(_LENGTH, "little"), data)
    ]
    body = b"".join(parts)
    file.write(len(body).to_bytes(_LENGTH, "little") + body)
    file.flush()


def _parsed(body: bytes) -> Iterator[Item]:
    place = 0
    while place < len(body):
        signed = place + _KEY + _SIGNATURE
        start = signed + _LENGTH
        end = start + int.from_bytes(body[signed:start], "little")
        yield body[place : place + _KEY], body[place + _KEY : signed], body[start:end]
        place = end


def main() -> None:
    """One worker."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(_LENGTH):
        body = source.read(int.from_bytes(header, "little"))
        target.write(first_bad(list(_parsed(body))).to_bytes(_LENGTH, "little", signed=True))
        target.flush()


if __name__ == "__main__":
    main()
