"""TLS for two threads: when the reader wakes, and that it always does."""

from __future__ import annotations

import array
import fcntl
import socket
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.transport.link.secure_stream import SecureStream
from dilocox.transport.link.tls import contexts
from dilocox.transport.link.tls_records import RECORD_BYTES, Records
from tests.support.linked import AUTHORITY
from tests.support.thread_sites import identity_of, until

pytestmark = pytest.mark.waits

LIMIT = 60.0


def record(size: int) -> bytes:
    """As long as a record of TLS 1.3 with so many bytes behind its header."""
    return b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size)


@given(st.lists(st.integers(1, 40), max_size=6), st.lists(st.integers(1, 30)))
def test_what_a_record_lacks_is_known_wherever_the_bytes_are_cut(
    sizes: list[int], cuts: list[int]
) -> None:
    whole = b"".join(map(record, sizes))
    ends = [sum(5 + size for size in sizes[: n + 1]) for n in range(len(sizes))]
    records, at = Records(), 0
    for cut in [*cuts, len(whole)]:
        records.passed(memoryview(whole[at : at + cut]))
        at = min(at + cut, len(whole))
        end = next((end for end in ends if end >= at), at)
        begin = max((each for each in [0, *ends] if each <= at), default=0)
        header = begin + 5
        lacks = header - at if begin < at < header else end - at
        assert records.missing == (0 if at == begin else lacks)


@pytest.fixture
def ends() -> Iterator[tuple[SecureStream, SecureStream, socket.socket]]:
    """Two ends of a connection that have greeted each other, and the socket of the second."""
    server, client = contexts(identity_of(AUTHORITY, "a"))
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    streams = (
        SecureStream(near, client, server_side=False),
        SecureStream(far, server, server_side=True),
    )
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda stream: stream.handshake(LIMIT), streams))
    for stream in streams:
        stream.wait_for_ever()
    yield (*streams, far)
    for stream in streams:
        stream.close()


class Reader:
    """A thread that fills a buffer."""

    def __init__(self, stream: SecureStream, size: int) -> None:
        self.data = bytearray(size)
        self.filled = 0
        self.ended = False
        self._stream = stream
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        view = memoryview(self.data)
        while self.filled < len(view):
            count = self._stream.receive_into(view[self.filled :])
            if not count:
                self.ended = True
                return
            self.filled += count


def unread(connection: socket.socket) -> int:
    """Bytes that the kernel holds for a socket's reader."""
    found = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, found)
    return found[0]


class Held:
    """A socket that sends only when it is told to."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    def sendall(self, data: bytes) -> None:
        self.held += data

    def let(self, count: int) -> None:
        """So many bytes may go."""
        self._line.sendall(self.held[:count])
        self.held = self.held[count:]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each packet wakes the reader")
def test_a_reader_sleeps_until_it_can_decrypt(
    ends: tuple[SecureStream, SecureStream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each packet it would take more processor time than for TLS."""
    near, far, line = ends
    payload = bytes(range(256)) * 200
    assert len(payload) > 3 * RECORD_BYTES
    held = Held(near._socket)
    monkeypatch.setattr(near, "_socket", held)
    near.send(payload)
    reader = Reader(far, len(payload))
    held.let(RECORD_BYTES // 2)
    time.sleep(0.2)
    assert unread(line) == RECORD_BYTES // 2
    while held.held:
        held.let(1000)
    assert until(lambda: reader.filled == len(payload))
    assert reader.data == payload


def test_a_reader_that_sleeps_wakes_when_the_connection_ends(
    ends: tuple[SecureStream, SecureStream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, _ = ends
    held = Held(near._socket)
    monkeypatch.setattr(near, "_socket", held)
    near.send(bytes(RECORD_BYTES))
    readers = [Reader(far, RECORD_BYTES), Reader(near, RECORD_BYTES)]
    held.let(RECORD_BYTES // 2)
    near.shut()
    for reader in readers:
        reader.thread.join(LIMIT)
        assert reader.ended


class Early:
    """A poll that returns with the first byte, as the kernel's may."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def poll(self) -> None:
        assert until(lambda: unread(self._line) > 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each packet wakes the reader")
def test_a_reader_that_is_woken_early_does_not_wait_for_what_it_has_taken(
    ends: tuple[SecureStream, SecureStream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that sleeps in the kernel is woken by unread bytes alone: less than it asked for
    may be all that is left."""
    near, far, line = ends
    payload = bytes(range(200)) * 100
    assert RECORD_BYTES < len(payload) < 2 * RECORD_BYTES
    held = Held(near._socket)
    monkeypatch.setattr(near, "_socket", held)
    monkeypatch.setattr(far, "_poll", Early(line))
    near.send(payload)
    reader = Reader(far, len(payload))
    held.let(len(payload) // 2)
    assert until(lambda: unread(line) == 0)
    held.let(len(held.held))
    assert until(lambda: reader.filled == len(payload))
    assert reader.data == payload


def test_whatever_sizes_are_sent_and_read_all_arrives(
    ends: tuple[SecureStream, SecureStream, socket.socket],
) -> None:
    near, far, _ = ends
    sizes = [25, 1, 16384, 25, 16385, 25, 262144, 25, 70000, 1400, 1401, 25]
    payload = b"".join(bytes([number]) * size for number, size in enumerate(sizes))

    def read() -> bytes:
        found = []
        for size in sizes:
            view, at = memoryview(bytearray(size)), 0
            while at < size:
                at += far.receive_into(view[at:])
            found.append(bytes(view))
        return b"".join(found)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read)
        for number, size in enumerate(sizes):
            near.send(bytes([number]) * size)
        assert found.result(LIMIT) == payload
