"""Carries bytes between a local socket and a TLS socket, both ways, in one thread."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl

BUFFER_BYTES = 1 << 18
_READ, _WRITE = select.POLLIN, select.POLLOUT


class _Lane:
    """One direction. What it waits for: `source_wants` and `sink_wants` (poll events, 0: none)."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._drained = False
        self.over = False
        self.source_wants = self.sink_wants = 0

    def move(self) -> bool:
        """Read and write once, as much as goes at once; false if nothing could be moved."""
        self.source_wants = self.sink_wants = 0
        if self.over:
            return False
        # While a TLS write is under way its bytes must stay, so nothing is read meanwhile.
        if self._start == self._end and not self._fill():
            return False
        return self._empty()

    def _fill(self) -> bool:
        """Read until the buffer is full or the source would block; false if nothing came."""
        self._start = self._end = 0
        while self._end < BUFFER_BYTES and not self._drained:
            try:
                count = self.source.recv_into(self._buffer[self._end :])
            except (ssl.SSLWantReadError, BlockingIOError):
                self.source_wants = _READ
                break
            except ssl.SSLWantWriteError:
                self.source_wants = _WRITE
                break
            self._drained = count == 0
            self._end += count
        return self._end > 0 or self._drained

    def _empty(self) -> bool:
        """Write all there is; false if the sink blocks before the end."""
        while self._start < self._end:
            try:
                self._start += self.sink.send(self._buffer[self._start : self._end])
            except (ssl.SSLWantWriteError, BlockingIOError):
                self.sink_wants = _WRITE
                return False
            except ssl.SSLWantReadError:
                self.sink_wants = _READ
                return False
        if self._drained:
            self.over = True
            # Under TLS too the end of this direction is TCP's: Gloo knows its own lengths.
            socket.socket.shutdown(self.sink, socket.SHUT_WR)
        return True


def relay(plain: socket.socket, secure: ssl.SSLSocket) -> None:
    """Carry bytes until both directions have ended or one broke; closes both sockets.

    One thread for both directions: an SSL object must not be used by two at a time.
    """
    # A broken side breaks the other one: that is how its owner learns of it.
    with contextlib.closing(plain), contextlib.closing(secure), contextlib.suppress(OSError):
        plain.setblocking(False)
        secure.setblocking(False)
        _run(_Lane(plain, secure), _Lane(secure, plain))


def _run(out: _Lane, back: _Lane) -> None:
    plain, secure = out.source.fileno(), out.sink.fileno()
    while not (out.over and back.over):
        if out.move() | back.move():
            continue
        poll = select.poll()
        # A socket that is waited for by nobody is left out: its hang-up would end every wait.
        for descriptor, events in (
            (plain, out.source_wants | back.sink_wants),
            (secure, out.sink_wants | back.source_wants),
        ):
            if events:
                poll.register(descriptor, events)
        poll.poll()
