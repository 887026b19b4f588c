"""Measures the link between two machines: what one sends and the other receives, over TCP.

One of them answers (`answer`), the other asks (`measure_link`) and opens all connections, so that
only the first needs a port that can be reached. What is sent is noise, which no tunnel on the way
makes smaller; the receiver counts, and no clock is compared with another machine's.
"""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dilocox.errors import ConfigError, TrainingError

CONNECTIONS = 4
"""At a time, in one direction: a single one may not fill a long line."""
WARM_UP, SECONDS = 2.0, 8.0
"""That nothing is counted for, while the windows grow; and that is counted then: what a connection
holds back behind a lost packet comes all at once, and in three seconds that was 7 % of a line."""
PINGS = 10
PATIENCE = 15.0
"""Seconds without a sign of the other end after which it is given up."""
LONGEST = 60.0
"""Seconds that a sender goes on for, if nobody ends it."""
HELLO = b"dilocox link 1 "
CONTROL, DATA = HELLO + b"control\n", HELLO + b"data\n"
READY, PING, UP, DOWN, BYE = b"ready\n", b"ping\n", b"up\n", b"down\n", b"bye\n"
LONGEST_LINE = 64
HINT = "; is `dilocox plan --answer PORT` running there, and the port open?"
_BLOCK = 1 << 18
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops what is still to be sent, which on a slow line may take minutes."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredLink:
    """A link as the asking machine sees it."""

    up: float
    """Payload bytes per second to the other machine."""
    down: float
    """From it."""
    rtt: float
    """Seconds there and back, median, while nothing else is under way."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, with brackets around a host that has colons itself. Raises
    `ConfigError`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f'--peer "{text}": write HOST:PORT, such as lyon.example.org:29600')
    return host, int(port)


def measure_link(host: str, port: int, progress: Progress = lambda _: None) -> MeasuredLink:
    """Measure the link to the machine that answers at `host`:`port`.

    Raises `TrainingError` if none answers there, or the connection is lost.
    """
    where = f"{host}:{port}"
    with _told(where, HINT), _connected(host, port, CONTROL) as control:
        lines = _lines(control)
        _expect(lines, READY, where)
        trips = []
        for _ in range(PINGS):
            begin = time.monotonic()
            control.sendall(PING)
            _expect(lines, PING, where)
            trips.append(time.monotonic() - begin)
        progress(f"the link to {where}, sending")
        control.sendall(UP)
        with _several(host, port) as data:
            _send_until_closed(data)
        up = _number(next(lines, b""), where)
        progress(f"the link to {where}, receiving")
        control.sendall(DOWN)
        with _several(host, port) as data:
            down = _receive_rate(data)
        control.sendall(BYE)
    # The first one may have waited for a look-up on the way, or a radio that slept.
    return MeasuredLink(up, down, statistics.median(trips[1:]))


def listen(port: int) -> socket.socket:
    """A port for `answer`, at all addresses. Raises `ConfigError` if it cannot be had."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=16, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=16)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--answer {port}: cannot listen there ({reason})") from None


def answer(listener: socket.socket, progress: Progress = lambda _: None) -> None:
    """Answer one measurement at a port of `listen`, close it and return.

    Anyone who reaches the port may ask; they learn nothing but how fast the line is. Raises
    `TrainingError` if the connection is lost.
    """
    with listener:
        control, asker = _accept(listener, CONTROL, None)
        name = asker.removeprefix("::ffff:")
        with control, _told(name):
            progress(f"the link to {name}")
            control.settimeout(PATIENCE + LONGEST)
            control.sendall(READY)
            for line in _lines(control):
                if line == PING:
                    control.sendall(PING)
                elif line == UP:
                    with _accepted(listener, asker) as data:
                        rate = _receive_rate(data)
                    control.sendall(f"{rate!r}\n".encode())
                elif line == DOWN:
                    with _accepted(listener, asker) as data:
                        _send_until_closed(data)
                elif line == BYE:
                    return
                else:
                    break
            raise TrainingError(f"{name}: went away before the link was measured")


def _receive_rate(sockets: Sequence[socket.socket]) -> float:
    """Bytes per second that come in over `sockets` in `SECONDS`, after `WARM_UP`. They are to be
    closed then. Raises `TrainingError` if nothing comes."""
    buffer = bytearray(1 << 20)
    counted, first, last = 0, None, 0.0
    start: float | None = None
    with _selecting(sockets, selectors.EVENT_READ) as selector:
        while True:
            ready = selector.select(PATIENCE)
            if not ready:
                raise TrainingError("nothing came over the line")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                try:
                    size = key.fileobj.recv_into(buffer)
                except BlockingIOError:
                    continue  # the kernel may have thought better of it
                if not size:
                    raise TrainingError("the other end stopped sending")
                now = time.monotonic()
                start = now if start is None else start
                if first is not None:
                    counted, last = counted + size, now
                elif now >= start + WARM_UP:
                    # What came at this moment was sent before it: counting begins behind it.
                    first = now
            if first is not None and last >= first + SECONDS:
                return counted / (last - first)


def _send_until_closed(sockets: Sequence[socket.socket]) -> None:
    """Send noise over `sockets` until the other end closes one of them.

    Raises `TrainingError` if it does not within `LONGEST`.
    """
    block = memoryview(os.urandom(_BLOCK))
    until = time.monotonic() + LONGEST
    with _selecting(sockets, selectors.EVENT_WRITE) as selector:
        while time.monotonic() < until:
            for key, _ in selector.select(1.0):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    key.fileobj.send(block)
                except (ConnectionResetError, BrokenPipeError):
                    return
                except BlockingIOError:
                    continue
    raise TrainingError("the other end never said that it had enough")


@contextmanager
def _selecting(sockets: Sequence[socket.socket], events: int) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            each.setblocking(False)
            selector.register(each, events)
        yield selector


@contextmanager
def _closing(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    """Close them at the end, at once."""
    try:
        yield sockets
    finally:
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            each.close()


def _connected(host: str, port: int, hello: bytes) -> socket.socket:
    made = socket.create_connection((host, port), timeout=PATIENCE)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.settimeout(PATIENCE + WARM_UP + SECONDS)
    made.sendall(hello)
    return made


@contextmanager
def _several(host: str, port: int) -> Iterator[list[socket.socket]]:
    with _closing([]) as sockets:
        for _ in range(CONNECTIONS):
            sockets.append(_connected(host, port, DATA))
        yield sockets


@contextmanager
def _accepted(listener: socket.socket, asker: str) -> Iterator[list[socket.socket]]:
    with _closing([]) as sockets:
        while len(sockets) < CONNECTIONS:
            sockets.append(_accept(listener, DATA, asker)[0])
        yield sockets


def _accept(listener: socket.socket, hello: bytes, asker: str | None) -> tuple[socket.socket, str]:
    """The next connection that begins with `hello`, of `asker` if one is given, and whose it is.

    Others are closed. Raises `TrainingError` if `asker` does not come within `PATIENCE`.
    """
    until = time.monotonic() + PATIENCE
    while True:
        listener.settimeout(None if asker is None else max(0.01, until - time.monotonic()))
        try:
            made, address = listener.accept()
        except TimeoutError:
            raise TrainingError(f"{asker}: went away before the link was measured") from None
        made.settimeout(2.0)
        try:
            came = made.recv(len(hello), socket.MSG_WAITALL)
        except OSError:
            came = b""
        if came == hello and asker in (None, address[0]):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made, str(address[0])
        made.close()


def _lines(control: socket.socket) -> Iterator[bytes]:
    """What the other end says, line by line, until it closes or says too much at once."""
    held = b""
    while True:
        while (end := held.find(b"\n")) >= 0:
            yield held[: end + 1]
            held = held[end + 1 :]
        some = control.recv(LONGEST_LINE) if len(held) < LONGEST_LINE else b""
        if not some:
            return
        held += some


def _expect(lines: Iterator[bytes], wanted: bytes, where: str) -> None:
    if next(lines, b"") != wanted:
        raise TrainingError(
            f"{where}: what answers there does not measure links; start "
            "`dilocox plan --answer PORT` on that machine"
        )


def _number(line: bytes, where: str) -> float:
    try:
        found = float(line)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e15:
        raise TrainingError(f"{where}: the other end could not measure the link; try again")
    return found


@contextmanager
def _told(where: str, hint: str = "") -> Iterator[None]:
    """Errors of sockets as one line that names the other end."""
    try:
        yield
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise TrainingError(f"{where}: the link cannot be measured ({reason}){hint}") from None
