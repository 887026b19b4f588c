"""Measures the TCP throughput and round trip between two machines.

One machine answers (`answer`). The other one asks (`measure_link`) and opens all connections, so
that only the answering machine needs a reachable port. The sender sends random bytes, which no
tunnel can compress. The receiver counts bytes by its own clock; clocks are never compared.
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
"""Connections in parallel, one direction at a time. A single one may not fill a link with a long
round trip."""
WARM_UP, SECONDS = 2.0, 8.0
"""Seconds of warm-up in which TCP windows grow, and seconds that are counted. The counted time is
long because data held back behind a lost packet arrives all at once: with three seconds, that was
7 % of a link's rate."""
PINGS = 10
"""Round trips that are timed."""
PATIENCE = 15.0
"""Timeout in seconds: a peer that is silent for longer counts as lost."""
LONGEST = 60.0
"""Seconds after which a sender stops, if the receiver has not closed a connection."""
HELLO = b"dilocox link 1 "
CONTROL, DATA = HELLO + b"control\n", HELLO + b"data\n"
READY, PING, UP, DOWN, BYE = b"ready\n", b"ping\n", b"up\n", b"down\n", b"bye\n"
LONGEST_LINE = 64
HINT = "; is `dilocox plan --answer PORT` running there, and the port open?"
_BLOCK = 1 << 18
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value: closing a socket drops its unsent data, which could take minutes to send on a
slow link."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredLink:
    """A link as measured by the asking machine."""

    up: float
    """Payload bytes per second to the answering machine."""
    down: float
    """Payload bytes per second from the answering machine."""
    rtt: float
    """Median round trip in seconds, without other traffic."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`. An IPv6 address is written in square brackets.

    Raises `ConfigError` if `text` has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f'--peer "{text}": write HOST:PORT, such as lyon.example.org:29600')
    return host, int(port)


def measure_link(host: str, port: int, progress: Progress = lambda _: None) -> MeasuredLink:
    """Measure the link to the machine that answers at `host`:`port`.

    Raises `TrainingError` if nothing answers there, or the connection is lost.
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
    # The first ping may include an address look-up, or the wake-up of a radio link.
    return MeasuredLink(up, down, statistics.median(trips[1:]))


def listen(port: int) -> socket.socket:
    """Listen at `port` on all addresses, for `answer`. Raises `ConfigError` if that fails."""
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
    """Answer one measurement at the socket `listener`, then close it.

    Any machine that reaches the port may ask; it learns only the speed of the link. Raises
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
            raise TrainingError(f"{name}: disconnected before the link was measured")


def _receive_rate(sockets: Sequence[socket.socket]) -> float:
    """Return the bytes per second that arrive over `sockets` in `SECONDS`, after `WARM_UP`.

    The caller closes the sockets after that, which tells the sender to stop. Raises
    `TrainingError` if nothing arrives, or the sender closes a connection.
    """
    buffer = bytearray(1 << 20)
    counted, first, last = 0, None, 0.0
    start: float | None = None
    with _selecting(sockets, selectors.EVENT_READ) as selector:
        while True:
            ready = selector.select(PATIENCE)
            if not ready:
                raise TrainingError("link measurement: no data arrived from the other machine")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                try:
                    size = key.fileobj.recv_into(buffer)
                except BlockingIOError:
                    continue  # a socket may be reported as ready without being so
                if not size:
                    raise TrainingError("link measurement: the other machine stopped sending")
                now = time.monotonic()
                start = now if start is None else start
                if first is not None:
                    counted, last = counted + size, now
                elif now >= start + WARM_UP:
                    # Data of this read arrived before this moment, so counting begins after it.
                    first = now
            if first is not None and last >= first + SECONDS:
                return counted / (last - first)


def _send_until_closed(sockets: Sequence[socket.socket]) -> None:
    """Send random bytes over `sockets` until the other end closes one of them.

    Raises `TrainingError` if the other end does not within `LONGEST`.
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
    raise TrainingError("link measurement: the other machine did not end it; try again")


@contextmanager
def _selecting(sockets: Sequence[socket.socket], events: int) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            each.setblocking(False)
            selector.register(each, events)
        yield selector


@contextmanager
def _closing(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    """Close all `sockets` at the end without waiting for unsent data."""
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
    """Return the next connection that begins with `hello`, and its address.

    `asker`: the address that the connection must come from; None: any. Other connections are
    closed. Raises `TrainingError` if `asker` does not connect within `PATIENCE`.
    """
    until = time.monotonic() + PATIENCE
    while True:
        listener.settimeout(None if asker is None else max(0.01, until - time.monotonic()))
        try:
            made, address = listener.accept()
        except TimeoutError:
            raise TrainingError(f"{asker}: disconnected before the link was measured") from None
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
    """Yield the lines that the other end sends, until it closes or a line is too long."""
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
            f"{where}: the program that answers there does not measure links; start "
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
    """Turn errors of sockets into a `TrainingError` of one line that names the other end."""
    try:
        yield
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise TrainingError(f"{where}: the link cannot be measured ({reason}){hint}") from None
