"""TLS on a TCP connection, used by one sending thread and one receiving thread.

`ssl.SSLSocket` reads each record of 16 KiB with two system calls, and two threads must not use it
at once. Here TLS works in memory under a lock, and the threads move larger blocks between the TLS
buffers and the socket.
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
"""Bytes of one read from the socket. Blocks that fit the processor's cache are fastest."""
PACKET_BYTES = 1400
"""Bytes that arrive in one packet: for no more than these a reader does not poll first."""
NAP = 0.05
"""Seconds of one poll. After a longer poll the reader waits for fewer bytes, else for more."""


class SecureStream:
    """TLS over `connection`, which this object owns and closes. All errors are `OSError`."""

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
        """Bytes that must be there before the kernel wakes a poll (`SO_RCVLOWAT`)."""
        self._portion = RECORD_BYTES
        """Bytes for which a poll should wait; adapts between `RECORD_BYTES` and `READ_BYTES`."""

    def handshake(self, limit: float) -> None:
        """Do the TLS handshake within `limit` seconds. Raises `OSError`."""
        end = time.monotonic() + limit
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                # After an error this sends the TLS alert, which tells the peer the reason.
                self._limit(end)
                with contextlib.suppress(ssl.SSLError):
                    self._flush()
            self._limit(end)
            if not self._take():
                raise ConnectionError("the peer closed the connection")

    @property
    def certificate(self) -> bytes | None:
        """The peer's certificate, DER; None if the peer has sent none."""
        return self._tls.getpeercert(True)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all bytes of `parts`; block until the kernel has them. Raises `OSError`."""
        # TLS records must be sent in the order in which they were encrypted.
        with self._sending:
            with self._using:
                for part in parts:
                    if part:
                        self._tls.write(part)
                data = self._outgoing.read()
            self._socket.sendall(data)

    def receive_into(self, view: memoryview) -> int:
        """Receive bytes into the beginning of `view`; return their number, 0 at the end.

        The peer must send at least `len(view)` bytes or end the connection, because this thread may
        sleep until all of them have arrived. Raises `OSError`.
        """
        while True:
            filled = self._decrypt(view)
            if filled:
                return filled
            if filled is None or not self._take(len(view)):
                return 0

    def receive(self, count: int, limit: float) -> bytes:
        """Receive `count` bytes within `limit` seconds; fewer if the connection ends before.

        Raises `TimeoutError` after `limit` seconds, and `OSError`.
        """
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
        """Remove the time limit of all later sends and receives."""
        self._socket.settimeout(None)
        if sys.platform == "linux":
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)

    def shut(self) -> None:
        """Shut both directions: threads that wait in the stream wake with an error or its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. No thread may use the stream afterwards."""
        self.shut()
        self._socket.close()

    def _decrypt(self, view: memoryview) -> int | None:
        """Decrypt into `view` the bytes that are here; return their number, None at the end."""
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
        """Read bytes from the socket into TLS; return their number, 0 at the end.

        `coming`: decrypted bytes that the peer is certain to send.
        """
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
        """Read from the socket into the block. Return the number of bytes.

        0: the connection has ended. None: the kernel holds no bytes now.

        With a raised `SO_RCVLOWAT` the read must not sleep: after it has taken some bytes, only as
        many bytes again would wake it, and these may never come. The kernel also ends a poll early
        when its buffer is nearly full.
        """
        try:
            return self._socket.recv_into(
                self._block, 0, socket.MSG_DONTWAIT if self._least > 1 else 0
            )
        except BlockingIOError:
            return None

    def _wanted(self, coming: int) -> int:
        """Return how many bytes should have arrived before this thread wakes."""
        record = self._records.missing or min(coming, RECORD_BYTES)
        # Up to one record of the coming bytes may be here already, in a record not yet complete.
        return max(record, min(coming - RECORD_BYTES, self._portion))

    def _sleep_until(self, poll: select.poll, count: int) -> None:
        """Sleep until about `count` bytes are there, instead of waking for each packet.

        Waking for each packet took half of the processor time of transfers
        (docs/notes/transport.md).
        """
        if count <= PACKET_BYTES and self._least == 1:
            return
        # Poll before the read: a blocking read takes the bytes that are there, and then waits for
        # `SO_RCVLOWAT` bytes again.
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
