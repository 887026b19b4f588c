"""The working half of a tunnel: one public port, and a thread for each connection it carries.

A connection begins with TLS 1.3, both ends certified. The one that connects then names a route (a
group at the other rank); the one that listens answers with one byte, and from there on the bytes
are Gloo's. Local ends are on loopback, so users of the same machine are trusted.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dilocox.errors import ConfigError, ExchangeError
from dilocox.outer.coordinator.identity import Identity
from dilocox.outer.coordinator.strangers import Strangers
from dilocox.outer.coordinator.timeouts import Timeouts
from dilocox.outer.sockets import set_congestion
from dilocox.outer.tunnel_addresses import CONNECT_HOST, GLOO_HOST
from dilocox.outer.tunnel_relay import relay
from dilocox.outer.tunnel_tls import StrangerError, contexts, site_of, tune

log = logging.getLogger(__name__)

FIRST_WORD = 3.0
"""Seconds in which a connection must begin with TLS."""
_ROUTE_BYTES = 32
_OUT_OF_FILES_PAUSE = 0.5
_WELCOME, _UNKNOWN = b"1", b"0"


class UnreachableError(ExchangeError):
    """A peer's tunnel cannot be reached at the moment."""


@dataclass(eq=False)
class _Stranger:
    """A connection that has not shown yet who it is."""

    socket: socket.socket
    turned_away: bool = False


@dataclass
class _Route:
    port: int
    sites: frozenset[str]
    dialled: list[socket.socket] = field(default_factory=list)
    """Local listeners of this route that Gloo has not connected to yet."""


class Carrier:
    """Carries the groups of one rank of `identity`'s site until `close`. Thread-safe."""

    def __init__(
        self, identity: Identity, timeouts: Timeouts, congestion: str | None = None
    ) -> None:
        """`congestion`: TCP congestion control between the sites, if not the machine's."""
        self._identity = identity
        self._timeouts = timeouts
        self._congestion = congestion
        self._server, self._client = contexts(identity)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._routes: dict[str, _Route] = {}
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._strangers: Strangers[_Stranger] = Strangers()

    def listen(self, host: str, port: int) -> int:
        """Begin to listen at `host`:`port` (0: any); the port. Raises `ConfigError`."""
        listener = listener_at(self._identity.site, host, port)
        self._listener = listener
        self._start(self._accept, listener, name="tunnel-door")
        return int(listener.getsockname()[1])

    def offer(self, route: str, port: int, sites: Sequence[str]) -> None:
        """Lead connections of `sites` that name `route` to Gloo's `port`."""
        with self._lock:
            self._routes[route] = _Route(port, frozenset(sites))

    def withdraw(self, route: str) -> None:
        """No new connections on `route`; those there are end with Gloo's own."""
        with self._lock:
            gone = self._routes.pop(route, None)
            for listener in gone.dialled if gone else []:
                _shut(listener, socket.SHUT_RDWR)

    def dial(
        self, mine: str, site: str, host: str, port: int, route: str, wait: float, limit: float
    ) -> int:
        """Connect to `route` of `site`'s rank: the loopback port on which Gloo finds it.

        `mine` is the own route that this is for; `limit`: seconds for the connection; `wait`:
        seconds until Gloo must have come. Raises `UnreachableError`, and `StrangerError` if the
        other end is not that site or does not accept this one.
        """
        secure = self._reach(site, host, port, route, limit)
        try:
            local = socket.create_server((CONNECT_HOST, 0), backlog=1)
        except OSError:
            secure.close()
            raise
        found = int(local.getsockname()[1])
        with self._lock:
            known = self._routes.get(mine)
            if known is not None:
                known.dialled.append(local)
        if known is None:
            local.close()
            secure.close()
            raise UnreachableError("the group is closed here")
        self._start(self._carry_own, known, local, secure, wait, name=f"tunnel-to-{site}")
        return found

    def connections(self) -> int:
        """Threads that carry a connection, or are about to."""
        with self._lock:
            return sum(thread.name != "tunnel-door" for thread in self._threads)

    def close(self) -> None:
        """End all connections and threads; what Gloo has handed over by now still goes out."""
        with self._lock:
            self._closed = True
            cut = [self._listener] if self._listener else []
            cut += [item for route in self._routes.values() for item in route.dialled]
            self._routes.clear()
            for item in cut:
                _shut(item, socket.SHUT_RDWR)
            for item in self._open:
                if not isinstance(item, ssl.SSLSocket):
                    _shut(item, socket.SHUT_RD)  # what has been received is still read
            threads = list(self._threads)
        _join(threads, self._timeouts.parting)
        with self._lock:
            for item in self._open:
                _shut(item, socket.SHUT_RDWR)
        _join(threads, self._timeouts.greeting)

    def _start(self, function: Callable[..., None], *arguments: object, name: str) -> None:
        def run() -> None:
            try:
                function(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    @contextlib.contextmanager
    def _cut_by_close(self, held: socket.socket) -> Iterator[None]:
        """Close `held` in the end; `close` ends it before."""
        with contextlib.closing(held):
            with self._lock:
                if self._closed:
                    raise UnreachableError("the tunnel is closed")
                self._open.add(held)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(held)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.closing(listener):
            while not self._closed:
                try:
                    connection, where = listener.accept()
                except OSError as error:
                    if not self._closed:
                        log.warning("tunnel: a connection could not be taken: %s", error)
                        time.sleep(_OUT_OF_FILES_PAUSE)
                    continue
                stranger = _Stranger(connection)
                with self._lock:
                    oldest = self._strangers.add(stranger, where[0], time.monotonic())
                    if oldest is not None:
                        # Its thread wakes, and ends it.
                        oldest.turned_away = True
                        _shut(oldest.socket, socket.SHUT_RDWR)
                self._start(self._carry_theirs, stranger, where[0], name="tunnel-from")

    def _carry_theirs(self, stranger: _Stranger, where: str) -> None:
        try:
            try:
                secure = self._shown(stranger)
                with contextlib.ExitStack() as held:
                    held.enter_context(self._cut_by_close(secure))
                    plain = self._greet(secure)
                    held.enter_context(self._cut_by_close(plain))
                    carried = held.pop_all()
            finally:
                with self._lock:
                    self._strangers.discard(stranger)
            with carried:
                relay(plain, secure)
        except (ExchangeError, OSError) as error:
            if not self._closed:
                why = "too many strangers" if stranger.turned_away else _reason(error)
                log.warning("tunnel: refused a connection from %s: %s", where, why)

    def _shown(self, stranger: _Stranger) -> ssl.SSLSocket:
        """TLS on a connection that has begun to speak, not greeted yet. Raises `OSError`."""
        connection = stranger.socket
        with self._lock:
            self._open.add(connection)  # `close` ends the wait
        try:
            connection.settimeout(min(FIRST_WORD, self._timeouts.greeting))
            if self._closed or not connection.recv(1, socket.MSG_PEEK):
                raise ConnectionError("it went without a word")
        except OSError:
            connection.close()
            raise
        finally:
            with self._lock:
                self._open.discard(connection)
        secure = self._secured(connection, self._timeouts.greeting, server_side=True)
        with self._lock:
            stranger.socket = secure
            if not stranger.turned_away:
                return secure
        secure.close()
        raise ConnectionError("too many strangers")

    def _greet(self, secure: ssl.SSLSocket) -> socket.socket:
        """Check who comes and where to; the connection to Gloo."""
        secure.do_handshake()
        site = site_of(secure.getpeercert(True), self._identity.authority, _now())
        name = b""
        while len(name) < _ROUTE_BYTES:
            more = secure.recv(_ROUTE_BYTES - len(name))
            if not more:
                raise StrangerError(f"site {site} went without a word")
            name += more
        with self._lock:
            route = self._routes.get(name.decode("ascii", "replace"))
        if route is None or site not in route.sites:
            secure.sendall(_UNKNOWN)
            raise StrangerError(f"site {site} asks for a group that is not here or not its own")
        plain = socket.create_connection((GLOO_HOST, route.port), self._timeouts.greeting)
        tune(plain)
        secure.sendall(_WELCOME)
        return plain

    def _secured(
        self, connection: socket.socket, limit: float, *, server_side: bool
    ) -> ssl.SSLSocket:
        """TLS on a TCP connection, not greeted yet; each operation has `limit` seconds."""
        context = self._server if server_side else self._client
        try:
            tune(connection)
            if self._congestion is not None:
                set_congestion(connection, self._congestion)
            connection.settimeout(limit)
            return context.wrap_socket(
                connection, server_side=server_side, do_handshake_on_connect=False
            )
        except OSError:
            connection.close()
            raise

    def _reach(self, site: str, host: str, port: int, route: str, limit: float) -> ssl.SSLSocket:
        """A connection that `site` has welcomed."""
        try:
            connection = socket.create_connection((host, port), timeout=limit)
            secure = self._secured(connection, limit, server_side=False)
        except OSError as error:
            raise UnreachableError(_reason(error)) from None
        with contextlib.ExitStack() as held:
            held.callback(secure.close)
            try:
                secure.do_handshake()
                found = site_of(secure.getpeercert(True), self._identity.authority, _now())
                if found != site:
                    raise StrangerError(f"site {found} answers there")
                secure.sendall(route.encode())
                answer = secure.recv(1)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                raise UnreachableError(_reason(error)) from None
            except ssl.SSLError as error:
                raise StrangerError(f"no tunnel of this run answers ({_reason(error)})") from None
            except OSError as error:
                raise UnreachableError(_reason(error)) from None
            if answer != _WELCOME:
                why = "its group is closed" if answer else "it closed the connection"
                raise UnreachableError(why)
            held.pop_all()
        return secure

    def _carry_own(
        self, route: _Route, local: socket.socket, secure: ssl.SSLSocket, wait: float
    ) -> None:
        try:
            with self._cut_by_close(secure):
                with contextlib.closing(local):
                    local.settimeout(wait)
                    try:
                        plain, _ = local.accept()
                    finally:
                        with self._lock:
                            route.dialled.remove(local)
                tune(plain)
                with self._cut_by_close(plain):
                    relay(plain, secure)
        except (ExchangeError, OSError) as error:
            log.debug("tunnel: a connection was not taken up: %s", _reason(error))


def listener_at(site: str, host: str, port: int) -> socket.socket:
    """A listening socket of `site`. Raises `ConfigError` if the port is taken or not allowed."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"sites.{site}.ports: port {port} on {host} cannot be listened at ({reason}); choose "
            f"other ports or another sites.{site}.interface, or end what holds the port"
        ) from None


def _shut(item: socket.socket, how: int) -> None:
    """Wake the thread that waits on a socket. TLS is left alone: another thread uses it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(item, how)


def _join(threads: Iterable[threading.Thread], limit: float) -> None:
    """Wait `limit` seconds for all."""
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error.strerror or 'ended'}".replace("_", " ").lower()
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
