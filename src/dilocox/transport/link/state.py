"""State of the messages on a link: requested, offered, acknowledged. No sockets, no threads.

The state survives broken connections. On each new connection both ends first repeat their
requests for the messages that they still wait for.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dilocox.transport.link.frames import CHUNK_BYTES, Frame, FrameError, Kind
from dilocox.transport.link.transfer import Transfer

REMEMBERED = 256
"""Newest received messages that are acknowledged again on a new connection, because the first
acknowledgement may have been lost with the old connection."""
MOST_WANTS = 4096
"""Limit of messages that a peer may request before this rank offers them."""


class Piece(NamedTuple):
    """Bytes of one message for the next `DATA` frame."""

    transfer: Transfer
    frame: Frame

    @property
    def view(self) -> memoryview:
        """The bytes of the frame."""
        return self.transfer.view[self.frame.offset : self.frame.offset + self.frame.length]


class LinkState:
    """Messages of one link by tag; a tag is used once in each direction. Not thread-safe."""

    def __init__(self) -> None:
        self._receives: dict[int, Transfer] = {}
        self._sends: dict[int, Transfer] = {}
        """Offered messages that the peer has not acknowledged yet."""
        self._wants: dict[int, tuple[int, int]] = {}
        """(offset, size) that the peer has requested, by tag, of messages not offered yet."""
        self._turn: deque[int] = deque()
        """Queue of messages with bytes to send; messages take turns."""
        self._words: deque[Frame] = deque()
        """Queue of frames without payload bytes."""
        self._finished: deque[int] = deque(maxlen=REMEMBERED)
        """Newest messages that were received whole."""

    @property
    def busy(self) -> bool:
        """True while bytes of some transfer have not moved yet."""
        return bool(self._receives) or any(not each.whole for each in self._sends.values())

    @property
    def unacknowledged(self) -> bool:
        """True while the peer has not acknowledged every offered message."""
        return bool(self._sends)

    @property
    def output(self) -> bool:
        """True while there are frames to send."""
        return bool(self._words or self._turn)

    def receive(self, tag: int, transfer: Transfer) -> None:
        """Request message `tag`."""
        self._receives[tag] = transfer
        self._words.append(Frame(Kind.WANT, tag, transfer.offset, transfer.size))

    def send(self, tag: int, transfer: Transfer) -> None:
        """Offer message `tag`: it travels once the peer requests it.

        Raises `FrameError` if the peer has requested another size.
        """
        self._sends[tag] = transfer
        if tag in self._wants:
            self._begin(tag, *self._wants.pop(tag))

    def withdraw(self, tag: int, transfer: Transfer) -> None:
        """Cancel a transfer."""
        if self._receives.get(tag) is transfer:
            del self._receives[tag]
            self._words.append(Frame(Kind.DROP, tag))
        if self._sends.get(tag) is transfer:
            del self._sends[tag]
            self._leave(tag)

    def say(self, kind: Kind) -> None:
        """Queue a frame that belongs to no message."""
        self._words.append(Frame(kind))

    def connected(self) -> None:
        """Start on a new connection: drop the peer's requests and all queued frames of the old one.

        Queues acknowledgements of the newest received messages, and requests for missing bytes.
        """
        self._wants.clear()
        self._turn.clear()
        self._words.clear()
        self._words.extend(Frame(Kind.DONE, tag) for tag in self._finished)
        for tag, each in self._receives.items():
            self._words.append(Frame(Kind.WANT, tag, each.offset, each.size))

    def heard(self, frame: Frame) -> None:
        """Process a received frame without payload bytes. Raises `FrameError` if it is invalid."""
        if frame.kind is Kind.WANT:
            if frame.tag in self._sends:
                self._begin(frame.tag, frame.offset, frame.length)
            elif len(self._wants) >= MOST_WANTS:
                raise FrameError(f"the peer requests more than {MOST_WANTS} messages")
            else:
                self._wants[frame.tag] = (frame.offset, frame.length)
        elif frame.kind is Kind.DONE:
            # The acknowledgement may come before the writer has called `sent` for the last bytes.
            done = self._sends.pop(frame.tag, None)
            if done is not None:
                self._leave(frame.tag)
                done.advance(done.size - done.offset)
        elif frame.kind is Kind.DROP:
            # This end may have cancelled the message, too. If not, its transfer fails after
            # `silence` seconds without movement.
            self._wants.pop(frame.tag, None)
            self._sends.pop(frame.tag, None)
            self._leave(frame.tag)
        elif frame.kind is Kind.PING:
            self._words.append(Frame(Kind.PONG))

    def target(self, frame: Frame) -> Transfer | None:
        """Return the transfer that takes the bytes after a `DATA` frame; None if it was cancelled.

        Raises `FrameError` if the bytes are not the next missing bytes.
        """
        transfer = self._receives.get(frame.tag)
        if transfer is None:
            return None
        if frame.offset != transfer.offset or frame.offset + frame.length > transfer.size:
            raise FrameError(
                f"the peer sent {frame.length} B from byte {frame.offset} on, but "
                f"{transfer.size - transfer.offset} B from byte {transfer.offset} on are missing"
            )
        transfer.begin()
        return transfer

    def arrived(self, tag: int, transfer: Transfer, count: int) -> None:
        """Record that `count` more bytes of message `tag` are in its tensor."""
        if self._receives.get(tag) is not transfer:
            return
        transfer.advance(count)
        if transfer.whole:
            del self._receives[tag]
            self._finished.append(tag)
            self._words.append(Frame(Kind.DONE, tag))

    def words(self) -> bytes:
        """Take all queued frames without payload bytes, encoded for sending."""
        data = b"".join(frame.pack() for frame in self._words)
        self._words.clear()
        return data

    def piece(self) -> Piece | None:
        """Take the next bytes to send; None if there are none. Messages take turns.

        Call `sent` once the bytes have been handed to the connection.
        """
        if not self._turn:
            return None
        tag = self._turn.popleft()
        transfer = self._sends[tag]
        length = min(CHUNK_BYTES, transfer.size - transfer.offset)
        return Piece(transfer, Frame(Kind.DATA, tag, transfer.offset, length))

    def sent(self, piece: Piece) -> None:
        """Record that the bytes of `piece` have been handed to the current connection."""
        tag, transfer = piece.frame.tag, piece.transfer
        if self._sends.get(tag) is not transfer or transfer.offset != piece.frame.offset:
            return
        transfer.advance(piece.frame.length)
        if not transfer.whole:
            self._turn.append(tag)

    def fail(self, reason: str) -> None:
        """Fail all transfers with `reason`."""
        for each in (*self._receives.values(), *self._sends.values()):
            each.fail(reason)
        self._receives.clear()
        self._sends.clear()
        self._turn.clear()

    def _begin(self, tag: int, offset: int, size: int) -> None:
        transfer = self._sends[tag]
        if size != transfer.size or offset >= size:
            raise FrameError(
                f"the peer requests {size} B from byte {offset} on of a message of "
                f"{transfer.size} B"
            )
        transfer.offset = offset
        self._leave(tag)
        self._turn.append(tag)

    def _leave(self, tag: int) -> None:
        if tag in self._turn:
            self._turn.remove(tag)
