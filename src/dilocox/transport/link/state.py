"""What the two ends of a link owe each other, without sockets and threads.

The state outlives its connections: each new connection begins with what this end still waits for,
and the peer does the same.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dilocox.transport.link.frames import CHUNK_BYTES, Frame, FrameError, Kind
from dilocox.transport.link.transfer import Transfer

REMEMBERED = 256
"""Messages whose end is said again on a new connection: the first word of it may be lost."""
MOST_WANTS = 4096
"""Messages that a peer may ask for before this rank offers them."""


class Piece(NamedTuple):
    """Bytes of one message to be sent now."""

    transfer: Transfer
    frame: Frame

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.transfer.view[self.frame.offset : self.frame.offset + self.frame.length]


class LinkState:
    """Messages of one link by tag; a tag is used once in each direction. Not thread-safe."""

    def __init__(self) -> None:
        self._receives: dict[int, Transfer] = {}
        self._sends: dict[int, Transfer] = {}
        """Offered, and not acknowledged yet."""
        self._wants: dict[int, tuple[int, int]] = {}
        """(offset, size) by tag, as the peer asked, of messages that have not been offered."""
        self._turn: deque[int] = deque()
        """Messages with bytes to send."""
        self._words: deque[Frame] = deque()
        """Frames without bytes to send."""
        self._finished: deque[int] = deque(maxlen=REMEMBERED)

    @property
    def busy(self) -> bool:
        """True while a transfer has not ended."""
        return bool(self._receives) or any(not each.whole for each in self._sends.values())

    @property
    def unacknowledged(self) -> bool:
        """True while the peer has not said that it has all that was sent."""
        return bool(self._sends)

    @property
    def output(self) -> bool:
        """True while there is something to send."""
        return bool(self._words or self._turn)

    def receive(self, tag: int, transfer: Transfer) -> None:
        """Ask for message `tag`."""
        self._receives[tag] = transfer
        self._words.append(Frame(Kind.WANT, tag, transfer.offset, transfer.size))

    def send(self, tag: int, transfer: Transfer) -> None:
        """Offer message `tag`: it travels once the peer asks for it. Raises `FrameError`."""
        self._sends[tag] = transfer
        if tag in self._wants:
            self._begin(tag, *self._wants.pop(tag))

    def withdraw(self, tag: int, transfer: Transfer) -> None:
        """Give a transfer up."""
        if self._receives.get(tag) is transfer:
            del self._receives[tag]
            self._words.append(Frame(Kind.DROP, tag))
        if self._sends.get(tag) is transfer:
            del self._sends[tag]
            self._leave(tag)

    def say(self, kind: Kind) -> None:
        """Send a frame that concerns no message."""
        self._words.append(Frame(kind))

    def connected(self) -> None:
        """A new connection: what either end was told on the old one does not count."""
        self._wants.clear()
        self._turn.clear()
        self._words.clear()
        self._words.extend(Frame(Kind.DONE, tag) for tag in self._finished)
        for tag, each in self._receives.items():
            self._words.append(Frame(Kind.WANT, tag, each.offset, each.size))

    def heard(self, frame: Frame) -> None:
        """A frame without bytes came. Raises `FrameError`."""
        if frame.kind is Kind.WANT:
            if frame.tag in self._sends:
                self._begin(frame.tag, frame.offset, frame.length)
            elif len(self._wants) >= MOST_WANTS:
                raise FrameError(f"it asks for more than {MOST_WANTS} messages")
            else:
                self._wants[frame.tag] = (frame.offset, frame.length)
        elif frame.kind is Kind.DONE:
            # It may come before this end has noted that the last bytes are out.
            done = self._sends.pop(frame.tag, None)
            if done is not None:
                self._leave(frame.tag)
                done.advance(done.size - done.offset)
        elif frame.kind is Kind.DROP:
            # Who has given the message up hears of it here; who has not is told by the silence.
            self._wants.pop(frame.tag, None)
            self._sends.pop(frame.tag, None)
            self._leave(frame.tag)
        elif frame.kind is Kind.PING:
            self._words.append(Frame(Kind.PONG))

    def target(self, frame: Frame) -> Transfer | None:
        """Whose bytes follow a `DATA` frame; None if nobody waits for them any more.

        Raises `FrameError` for bytes that are not the next ones.
        """
        transfer = self._receives.get(frame.tag)
        if transfer is None:
            return None
        if frame.offset != transfer.offset or frame.offset + frame.length > transfer.size:
            raise FrameError(
                f"{frame.length} B from byte {frame.offset} on came, where "
                f"{transfer.size - transfer.offset} B from byte {transfer.offset} on are missing"
            )
        transfer.begin()
        return transfer

    def arrived(self, tag: int, transfer: Transfer, count: int) -> None:
        """`count` bytes of message `tag` are in its tensor."""
        if self._receives.get(tag) is not transfer:
            return
        transfer.advance(count)
        if transfer.whole:
            del self._receives[tag]
            self._finished.append(tag)
            self._words.append(Frame(Kind.DONE, tag))

    def words(self) -> bytes:
        """All frames without bytes, to be sent now."""
        data = b"".join(frame.pack() for frame in self._words)
        self._words.clear()
        return data

    def piece(self) -> Piece | None:
        """Bytes to be sent now: messages take turns. Say `sent` when they are on their way."""
        if not self._turn:
            return None
        tag = self._turn.popleft()
        transfer = self._sends[tag]
        length = min(CHUNK_BYTES, transfer.size - transfer.offset)
        return Piece(transfer, Frame(Kind.DATA, tag, transfer.offset, length))

    def sent(self, piece: Piece) -> None:
        """The bytes of `piece` have been handed to the connection that there is."""
        tag, transfer = piece.frame.tag, piece.transfer
        if self._sends.get(tag) is not transfer or transfer.offset != piece.frame.offset:
            return
        transfer.advance(piece.frame.length)
        if not transfer.whole:
            self._turn.append(tag)

    def fail(self, reason: str) -> None:
        """Nothing moves on this link any more."""
        for each in (*self._receives.values(), *self._sends.values()):
            each.fail(reason)
        self._receives.clear()
        self._sends.clear()
        self._turn.clear()

    def _begin(self, tag: int, offset: int, size: int) -> None:
        transfer = self._sends[tag]
        if size != transfer.size or offset >= size:
            raise FrameError(
                f"it waits for {size} B from byte {offset} on, where {transfer.size} B are sent"
            )
        transfer.offset = offset
        self._leave(tag)
        self._turn.append(tag)

    def _leave(self, tag: int) -> None:
        if tag in self._turn:
            self._turn.remove(tag)
