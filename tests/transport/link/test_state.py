"""Messages between two ends of a link whose connection breaks anywhere, without sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.errors import ExchangeError
from dilocox.transport.link import state as link_state
from dilocox.transport.link import transfer as transfers
from dilocox.transport.link.frames import (
    CHUNK_BYTES,
    HEADER_BYTES,
    Frame,
    FrameError,
    Kind,
    read_frame,
)
from dilocox.transport.link.state import MOST_WANTS, LinkState
from dilocox.transport.link.transfer import STEP_BYTES, Transfer

pytestmark = pytest.mark.waits

SIZES = st.lists(st.integers(1, 3 * CHUNK_BYTES), min_size=1, max_size=4)


def transfer(tensor: torch.Tensor, what: str = "receive") -> Transfer:
    return Transfer("b", tensor, what, 60.0)  # type: ignore[arg-type]


def noise(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)


def test_what_the_peer_has_is_sent_whatever_comes_next() -> None:
    """The peer has all, says so, and closes its end before the writer has noted its last piece."""
    state, sending = LinkState(), transfer(noise(8, 1), "send")
    state.send(7, sending)
    state.heard(Frame(Kind.WANT, 7, 0, 8))
    piece = state.piece()
    assert piece is not None
    state.heard(Frame(Kind.DONE, 7))
    state.fail("it has closed the group")
    assert sending.poll()
    state.sent(piece)
    assert sending.offset == 8
    assert not state.unacknowledged
    assert not state.output


class End:
    """One end of a link, and the bytes that it sends on a connection."""

    def __init__(self) -> None:
        self.state = LinkState()
        self._buffer = b""
        self._left = 0
        self._frame: Frame | None = None

    def output(self) -> bytes:
        """What it sends next."""
        data = self.state.words()
        piece = self.state.piece()
        if piece is not None:
            data += piece.frame.pack() + bytes(piece.view)
            self.state.sent(piece)
        return data

    def connected(self) -> None:
        """A new connection: what came in part is lost."""
        self._buffer, self._left, self._frame = b"", 0, None
        self.state.connected()

    def hears(self, data: bytes) -> None:
        """Bytes of the other end."""
        self._buffer += data
        while True:
            if self._left and self._frame is not None:
                if not self._buffer:
                    return
                count = min(self._left, len(self._buffer))
                found = self.state.target(self._frame)
                assert found is not None
                found.view[found.offset : found.offset + count] = self._buffer[:count]
                self.state.arrived(self._frame.tag, found, count)
                self._frame = self._frame._replace(
                    offset=self._frame.offset + count, length=self._frame.length - count
                )
                self._left -= count
                self._buffer = self._buffer[count:]
                continue
            if len(self._buffer) < HEADER_BYTES:
                return
            frame = read_frame(self._buffer[:HEADER_BYTES])
            self._buffer = self._buffer[HEADER_BYTES:]
            if frame.kind is Kind.DATA:
                self._frame, self._left = frame, frame.length
            else:
                self.state.heard(frame)


@settings(max_examples=60, deadline=None)
@given(there=SIZES, back=SIZES, data=st.data())
def test_all_bytes_arrive_however_often_the_connection_breaks(
    there: list[int], back: list[int], data: st.DataObject
) -> None:
    ends = [End(), End()]
    whole, sends, arrived = [], [], []
    posts: list[Iterator[None]] = []
    for near, (sizes, far) in enumerate(((there, 1), (back, 0))):
        for tag, size in enumerate(sizes):
            sent, into = noise(size, 7 * tag + near), torch.zeros(size, dtype=torch.uint8)
            gone, come = transfer(sent, "send"), transfer(into)
            whole.append((sent, into))
            sends.append(gone)
            arrived.append(come)

            def post(near: int = near, far: int = far, tag: int = tag, gone: Transfer = gone,
                     come: Transfer = come) -> Iterator[None]:  # fmt: skip
                # Either may be first: which one is drawn.
                first = data.draw(st.booleans())
                if first:
                    ends[near].state.send(tag, gone)
                    yield
                ends[far].state.receive(tag, come)
                if not first:
                    yield
                    ends[near].state.send(tag, gone)

            posts.append(post())
    breaks = data.draw(st.integers(0, 6))
    for _ in range(10_000):
        if posts:
            for each in list(posts):
                if next(each, posts) is posts:
                    posts.remove(each)
        quiet = not posts
        for near in (0, 1):
            told = ends[near].output()
            quiet = quiet and not told
            if told and breaks and data.draw(st.booleans()):
                breaks -= 1
                cut = data.draw(st.integers(0, len(told)))
                ends[1 - near].hears(told[:cut])
                for end in ends:
                    end.connected()
                continue
            ends[1 - near].hears(told)
        if quiet:
            break
    assert all(each.poll() for each in (*sends, *arrived))
    assert all(torch.equal(sent, into) for sent, into in whole)
    assert not any(end.state.unacknowledged or end.state.busy for end in ends)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_is_a_frame_or_refused(data: bytes) -> None:
    try:
        frame = read_frame(data)
    except FrameError:
        return
    assert frame.pack() == data
    assert frame.length <= (CHUNK_BYTES if frame.kind is Kind.DATA else 1 << 48)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(Kind), st.integers(0, 3), st.integers(0, 40), st.integers(0, 40)),
        max_size=30,
    )
)
def test_whatever_a_peer_says_no_byte_goes_beside_its_tensor(
    said: list[tuple[Kind, int, int, int]],
) -> None:
    """Every frame is refused, or leads to bytes of a tensor that are missing."""
    state = LinkState()
    into, out = transfer(torch.zeros(30, dtype=torch.uint8)), transfer(noise(30, 1), "send")
    state.receive(1, into)
    state.send(2, out)
    for kind, tag, offset, length in said:
        frame = Frame(kind, tag, offset, length)
        try:
            read_frame(frame.pack())
            if kind is Kind.DATA:
                found = state.target(frame)
                assert found is None or (found is into and tag == 1)
                if found is not None:
                    assert found.offset + length <= found.size
                    state.arrived(tag, found, length)
            else:
                state.heard(frame)
        except FrameError:
            continue
        piece = state.piece()
        if piece is not None:
            assert len(piece.view) == piece.frame.length > 0
            state.sent(piece)


def test_messages_take_turns() -> None:
    near = LinkState()
    for tag in (1, 2):
        near.send(tag, transfer(noise(2 * CHUNK_BYTES, tag), "send"))
        near.heard(Frame(Kind.WANT, tag, 0, 2 * CHUNK_BYTES))
    order = []
    while (piece := near.piece()) is not None:
        order.append(piece.frame.tag)
        near.sent(piece)
    assert order == [1, 2, 1, 2]


def test_nothing_is_sent_that_nobody_asked_for() -> None:
    near = LinkState()
    near.send(1, transfer(noise(10, 1), "send"))
    assert not near.output
    near.heard(Frame(Kind.DROP, 1))
    near.heard(Frame(Kind.WANT, 1, 0, 10))
    assert near.piece() is None


def test_a_peer_that_asks_for_another_size_is_refused() -> None:
    near = LinkState()
    near.send(1, transfer(noise(10, 1), "send"))
    with pytest.raises(FrameError, match="requests 11 B"):
        near.heard(Frame(Kind.WANT, 1, 0, 11))


def test_a_peer_cannot_ask_for_ever_more(monkeypatch: pytest.MonkeyPatch) -> None:
    near = LinkState()
    for tag in range(MOST_WANTS):
        near.heard(Frame(Kind.WANT, tag, 0, 1))
    with pytest.raises(FrameError, match="more than"):
        near.heard(Frame(Kind.WANT, MOST_WANTS, 0, 1))
    assert link_state.MOST_WANTS == MOST_WANTS


def test_what_is_given_up_does_not_travel() -> None:
    near = LinkState()
    into, out = transfer(torch.zeros(5, dtype=torch.uint8)), transfer(noise(5, 1), "send")
    near.receive(1, into)
    near.send(2, out)
    near.heard(Frame(Kind.WANT, 2, 0, 5))
    near.withdraw(1, into)
    near.withdraw(2, out)
    assert near.piece() is None
    assert near.target(Frame(Kind.DATA, 1, 0, 5)) is None
    kinds = [read_frame(word).kind for word in _cut(near.words())]
    assert kinds == [Kind.WANT, Kind.DROP]


def test_a_silent_transfer_fails_by_itself() -> None:
    given_up = []
    waits = Transfer(
        "b",
        torch.zeros(5, dtype=torch.uint8),
        "receive",
        0.0,
        withdraw=lambda _: given_up.append(1),
    )
    with pytest.raises(ExchangeError, match=r"link to b broke: nothing has moved for 0 s"):
        waits.poll(5.0)
    assert given_up == [1]


def test_who_drips_is_given_up_and_who_is_slow_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(transfers.time, "monotonic", lambda: clock[0])
    drips, slow = (
        Transfer("b", torch.zeros(4 * STEP_BYTES, dtype=torch.uint8), "receive", 60.0)
        for _ in range(2)
    )
    for _ in range(3):
        clock[0] += 50.0
        drips.advance(1)
        slow.advance(STEP_BYTES)
        assert not slow.poll()
    with pytest.raises(ExchangeError, match="nothing has moved for 60 s"):
        drips.poll()


def _cut(data: bytes) -> list[bytes]:
    return [data[at : at + HEADER_BYTES] for at in range(0, len(data), HEADER_BYTES)]
