"""TLS on a TCP connection for one thread that sends and one that receives.

`ssl.SSLSocket` reads each record of 16 KiB with two system calls, and must not be used by two
threads. Here TLS works in memory under a lock, and the threads move larger blocks between it and
the socket.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import sys
import threading
import time

from dilocox.transport.link.tls_records import RECORD_BYTES, Records

READ_BYTES = 1 << 16
"""Bytes of one read from the socket: what fits the processor's cache goes fastest."""
PACKET_BYTES = 1400
"""So few bytes come at once: nobody needs to poll for them."""
NAP = 0.05
"""Seconds: readers that sleep for longer wait for less the next time, others for more."""


class SecureStream:
    """Takes over `connection`, closed with it. Errors of TLS and TCP are `OSError`."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool
    ) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._using = threading.Lock()
        self._sending = threading.Lock()
        self._block = memoryview(bytearray(READ_BYTES))
        self._records = Records()
        self._poll: select.poll | None = None
        self._least = 1
        """Bytes for which the kernel wakes who polls."""
        self._portion = RECORD_BYTES

    def handshake(self, limit: float) -> None:
        """Show certificates, within `limit` seconds. Raises `OSError`."""
        end = time.monotonic() + limit
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                # An alert tells the peer why.
                self._limit(end)
                with contextlib.suppress(ssl.SSLError):
                    self._flush()
            self._limit(end)
            if not self._take():
                raise ConnectionError("it closed the connection")

    @property
    def certificate(self) -> bytes | None:
        """What the peer has shown, DER."""
        return self._tls.getpeercert(True)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all bytes of `parts`."""
        # Records go out in the order in which they were made.
        with self._sending:
            with self._using:
                for part in parts:
                    if part:
                        self._tls.write(part)
                data = self._outgoing.read()
            self._socket.sendall(data)

    def receive_into(self, view: memoryview) -> int:
        """Fill the beginning of `view`; how many bytes came, 0 at the end of the connection.

        The peer has to send `len(view)` bytes at least, or to end the connection: this thread may
        sleep until they are here.
        """
        while True:
            filled = self._decrypt(view)
            if filled:
                return filled
            if filled is None or not self._take(len(view)):
                return 0

    def receive(self, count: int, limit: float) -> bytes:
        """`count` bytes within `limit` seconds; fewer at the end of the connection."""
        end = time.monotonic() + limit
        data = bytearray(count)
        view, filled = memoryview(data), 0
        while filled < count:
            self._limit(end)
            more = self.receive_into(view[filled:])
            if not more:
                break
            filled += more
        return bytes(data[:filled])

    def wait_for_ever(self) -> None:
        """From now on nothing that is sent or received has a limit."""
        self._socket.settimeout(None)
        if sys.platform == "linux":
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)

    def shut(self) -> None:
        """End both directions: threads that use the stream wake with an error or its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the connection; no thread may use the stream any more."""
        self.shut()
        self._socket.close()

    def _decrypt(self, view: memoryview) -> int | None:
        """Bytes of `view` that could be filled at once; None after the peer's last byte."""
        filled = 0
        with self._using:
            while filled < len(view):
                try:
                    filled += self._tls.read(len(view) - filled, view[filled:])  # type: ignore[operator]
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLZeroReturnError:
                    return filled or None
        return filled

    def _take(self, coming: int = 1) -> int:
        """Bytes that came from the socket; 0 at its end. `coming`: so many plain bytes will come
        for sure."""
        count = None
        while count is None:
            if self._poll is not None:
                self._sleep_until(self._poll, self._wanted(coming))
            count = self._read_block()
        self._records.passed(self._block[:count])
        with self._using:
            self._incoming.write(self._block[:count])
        return count

    def _read_block(self) -> int | None:
        """Bytes read into the block, 0 at the end of the connection; None if nothing is there.

        Where the kernel was told to wake this thread for many bytes, the read does not sleep: once
        it has taken some of them, only as many again would wake it, and they may never come. The
        kernel ends a poll early when its buffer is nearly full.
        """
        try:
            return self._socket.recv_into(
                self._block, 0, socket.MSG_DONTWAIT if self._least > 1 else 0
            )
        except BlockingIOError:
            return None

    def _wanted(self, coming: int) -> int:
        """For how many bytes this thread should sleep."""
        record = self._records.missing or min(coming, RECORD_BYTES)
        # Of the record under way some of the bytes to come may be here.
        return max(record, min(coming - RECORD_BYTES, self._portion))

    def _sleep_until(self, poll: select.poll, count: int) -> None:
        """Let the kernel wake this thread when `count` bytes are there, and not for each packet:
        that took half of the processor time of all that travels (docs/notes/transport.md)."""
        if count <= PACKET_BYTES and self._least == 1:
            return
        # To poll, since a read takes the bytes that there are, and waits for as many again.
        if count != self._least:
            self._least = count if count > PACKET_BYTES else 1
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._least)
        begin = time.monotonic()
        poll.poll()
        if time.monotonic() - begin > NAP:
            self._portion = max(RECORD_BYTES, self._portion // 2)
        else:
            self._portion = min(READ_BYTES, self._portion * 2)

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data:
            self._socket.sendall(data)

    def _limit(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer")
        self._socket.settimeout(left)
