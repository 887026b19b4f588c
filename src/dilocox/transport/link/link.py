"""The link between this rank and one peer in one group: a sequence of connections.

After a connection has broken, the end that dialled first dials again, for at most `silence`
seconds. If the peer's machine refuses connections, the peer's process has ended: the link fails at
once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dilocox.errors import ExchangeError
from dilocox.transport.link.frames import HEADER_BYTES, Frame, Kind, read_frame
from dilocox.transport.link.secure_stream import SecureStream
from dilocox.transport.link.state import LinkState
from dilocox.transport.link.transfer import Transfer

log = logging.getLogger(__name__)

TICK = 1.0
"""Seconds between two checks of a link on which nothing moves."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two attempts to reconnect: the pause doubles from the first to the longest."""
RENEW_BYTES = 1 << 37
"""Bytes sent on one connection, after which a new one begins: AES-GCM keys have limits (RFC 8446,
5.5), and Python cannot change the key of a connection."""


class UnreachableError(ExchangeError):
    """A peer cannot be reached at the moment.

    `gone`: the peer refuses connections, or has closed the group; further attempts are useless.
    """

    def __init__(self, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


@dataclass(frozen=True)
class Ways:
    """The calls with which a link reconnects to its peer."""

    dial: Callable[[], SecureStream] | None
    """Connects to the peer; raises `ExchangeError`. None: the peer connects to this rank."""
    refuses: Callable[[], bool]
    """True if the peer's machine refuses connections: its process has ended."""


class Link:
    """Messages to and from one peer, until `close`. Thread-safe."""

    def __init__(self, name: str, site: str, silence: float, parting: float) -> None:
        """Create a link without a connection.

        Args:
            name: Name of the group, for the log.
            site: The peer's site.
            silence: Seconds without a connection after which the link fails.
            parting: Seconds that `close` waits for the peer to acknowledge received messages.
        """
        self.site = site
        self._name = name
        self._silence = silence
        self._parting = parting
        self._ways = Ways(None, lambda: False)
        self._state = LinkState()
        self._changed = threading.Condition()
        self._stream: SecureStream | None = None
        self._reader: threading.Thread | None = None
        self._writer: threading.Thread | None = None
        self._dead: str | None = None
        self._heard = time.monotonic()
        self._pinged = False
        self._sent_bytes = 0

    @property
    def attached(self) -> bool:
        """True once the link has had its first connection."""
        return self._writer is not None

    @property
    def failure(self) -> str | None:
        """Reason why the link has ended; None while the link is in use."""
        return self._dead

    def use(self, ways: Ways) -> None:
        """Set the calls that reconnect after a connection has broken."""
        self._ways = ways

    def attach(self, stream: SecureStream) -> None:
        """Close the old connection, if any, and resume all transfers on the new connection.

        Raises `ExchangeError` if the link has ended.
        """
        with self._changed:
            older, self._stream = self._stream, None
        self._part_from(older)
        with self._changed:
            if self._dead is not None:
                stream.close()
                raise ExchangeError(self._dead)
            stream.wait_for_ever()
            self._state.connected()
            self._stream = stream
            self._heard, self._pinged, self._sent_bytes = time.monotonic(), False, 0
            self._reader = self._begin(self._read, stream, name=f"from-{self.site}")
            if self._writer is None:
                self._writer = self._begin(self._write, name=f"to-{self.site}")
            self._changed.notify_all()

    def send(self, tag: int, transfer: Transfer) -> None:
        """Offer message `tag`: the bytes travel once the peer asks for them."""
        self._post(transfer, lambda: self._state.send(tag, transfer))

    def receive(self, tag: int, transfer: Transfer) -> None:
        """Ask the peer for message `tag`."""
        self._post(transfer, lambda: self._state.receive(tag, transfer))

    def withdraw(self, tag: int, transfer: Transfer) -> None:
        """Cancel a transfer: no further bytes of it travel."""
        with self._changed:
            self._state.withdraw(tag, transfer)
            self._changed.notify_all()

    def close(self) -> None:
        """End the link, after waiting up to `parting` seconds for acknowledgements of the peer."""
        end = time.monotonic() + self._parting
        with self._changed:
            while self._stream and self._state.unacknowledged and time.monotonic() < end:
                self._changed.wait(max(0.01, end - time.monotonic()))
            stream = self._stream
            if stream is not None:
                self._state.say(Kind.BYE)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._stream is not stream or not self._state.output, timeout=0.2
                )
        self._die("this rank has closed the group")

    def _post(self, transfer: Transfer, begin: Callable[[], None]) -> None:
        with self._changed:
            if self._dead is not None:
                transfer.fail(self._dead)
            elif transfer.size:
                if not self._state.busy:
                    # The link was idle, so the peer's silence until now means nothing.
                    self._heard, self._pinged = time.monotonic(), False
                try:
                    begin()
                except ExchangeError as error:
                    transfer.fail(str(error))
                self._changed.notify_all()

    def _begin(
        self, function: Callable[..., None], *arguments: object, name: str
    ) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _write(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait until there are frames to send, and send some; return False once the link has ended.

        A thread that waits has no reference to its last message, whose tensor is then free.
        """
        with self._changed:
            while self._dead is None and not (self._stream and self._state.output):
                self._changed.wait(TICK)
                self._look()
            if self._dead is not None or self._stream is None:
                return False
            stream, words, piece = self._stream, self._state.words(), self._state.piece()
        try:
            if piece is None:
                stream.send(words)
            else:
                stream.send(words + piece.frame.pack(), piece.view)
        except (OSError, ValueError) as error:
            self._lose(stream, str(error))
            return True
        with self._changed:
            if stream is not self._stream:
                return True
            self._heard = time.monotonic()
            self._changed.notify_all()
            if piece is not None:
                self._state.sent(piece)
                self._sent_bytes += piece.frame.length
        if self._sent_bytes > RENEW_BYTES:
            self._lose(stream, "its key has reached the limit of bytes")
        return True

    def _look(self) -> None:
        """Ping a silent peer; later, shut a connection on which it stays silent."""
        stream, idle = self._stream, time.monotonic() - self._heard
        if stream is None or not self._state.busy:
            return
        if idle > self._silence / 2:
            stream.shut()  # the reader thread sees the end and reconnects
        elif idle > self._silence / 4 and not self._pinged:
            self._pinged = True
            self._state.say(Kind.PING)

    def _read(self, stream: SecureStream) -> None:
        try:
            why = self._frames(stream)
        except ExchangeError as error:
            self._die(str(error))
            return
        except (OSError, ValueError) as error:
            why = str(error)
        self._lose(stream, why)

    def _frames(self, stream: SecureStream) -> str:
        """Receive frames until the connection ends; return the reason of its end.

        Raises `ExchangeError` if the peer closed the group or sent an invalid frame.
        """
        header = memoryview(bytearray(HEADER_BYTES))
        unwanted = memoryview(bytearray(1 << 16))
        while _filled(stream, header):
            why = self._take_frame(stream, read_frame(header), unwanted)
            if why is not None:
                return why
        return "the connection ended"

    def _take_frame(self, stream: SecureStream, frame: Frame, unwanted: memoryview) -> str | None:
        """Process a frame, and receive the bytes after it into the tensor of their message.

        Bytes of a cancelled message go into `unwanted`. A thread that waits for the next frame has
        no reference to the last message, whose tensor is then free.

        Returns None, or the reason why the connection ended. Raises `ExchangeError` if the peer
        closed the group or sent an invalid frame.
        """
        with self._changed:
            if stream is not self._stream:
                return "another connection has taken its place"
            self._heard, self._pinged = time.monotonic(), False
            if frame.kind is Kind.BYE:
                raise ExchangeError("it has closed the group")
            if frame.kind is not Kind.DATA:
                self._state.heard(frame)
                self._changed.notify_all()
                return None
            transfer = self._state.target(frame)
        left = frame.length
        while left:
            into = unwanted if transfer is None else transfer.view[transfer.offset :]
            count = stream.receive_into(into[:left])
            if not count:
                return "the connection ended"
            left -= count
            if transfer is None:
                continue
            with self._changed:
                if stream is not self._stream:
                    return "another connection has taken its place"
                self._heard = time.monotonic()
                self._state.arrived(frame.tag, transfer, count)
                if self._state.output:
                    self._changed.notify_all()
        return None

    def _lose(self, stream: SecureStream, why: str) -> None:
        """Drop a broken connection and start to reconnect."""
        stream.shut()
        with self._changed:
            if stream is not self._stream or self._dead is not None:
                return
            self._stream = None
            self._changed.notify_all()
            log.info("%s: the connection to %s broke (%s)", self._name, self.site, why)
            self._begin(self._find_again, why, name=f"again-{self.site}")

    def _find_again(self, why: str) -> None:
        end, pause = time.monotonic() + self._silence, FIRST_PAUSE
        while self._dead is None and self._stream is None:
            try:
                if self._ways.dial is not None:
                    self.attach(self._ways.dial())
                    return
                if self._ways.refuses():
                    self._die(f"{why}, and its process has ended")
                    return
            except UnreachableError as error:
                why = str(error)
                if error.gone:
                    self._die(why)
                    return
            except ExchangeError as error:
                self._die(str(error))
                return
            if time.monotonic() > end:
                self._die(f"{why}, and no new connection was made within {self._silence:g} s")
                return
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stream is not None or self._dead is not None, timeout=pause
                )
            pause = min(2 * pause, LONGEST_PAUSE)

    def _die(self, reason: str) -> None:
        with self._changed:
            if self._dead is None:
                self._dead = reason
                self._state.fail(reason)
            stream, self._stream = self._stream, None
            self._changed.notify_all()
        self._part_from(stream)

    def _part_from(self, stream: SecureStream | None) -> None:
        """Close a connection and wait for its reader, which must not write into tensors later."""
        if stream is None:
            return
        stream.shut()
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join()
        with contextlib.suppress(OSError):
            stream.close()


def _filled(stream: SecureStream, view: memoryview) -> bool:
    """Fill all of `view`. Returns False if the connection ends before that."""
    filled = 0
    while filled < len(view):
        count = stream.receive_into(view[filled:])
        if not count:
            return False
        filled += count
    return True
