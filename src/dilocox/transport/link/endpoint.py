"""One rank's endpoint for links: one listening port, and TLS 1.3 with certificates of both ends.

The connecting end sends a route, which names a group at the other rank. The listening end answers
with one byte. After that byte the connection carries frames (`dilocox.transport.link.frames`).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.errors import ConfigError, ExchangeError
from dilocox.transport.link.addresses import Announcement, Door, SiteKeys, door_of
from dilocox.transport.link.interfaces import interface_address
from dilocox.transport.link.link import Link, UnreachableError
from dilocox.transport.link.secure_stream import SecureStream
from dilocox.transport.link.tcp import set_congestion
from dilocox.transport.link.tls import UnauthenticatedPeerError, contexts, site_of, tune
from dilocox.utils.unauthenticated import Strangers

log = logging.getLogger(__name__)

FIRST_WORD = 3.0
"""Seconds within which the first byte of an accepted connection must arrive."""
_ROUTE_BYTES = 32
_OUT_OF_FILES_PAUSE = 0.5
"""Seconds before the next accept after a failed one, for example with too many open files."""
_WELCOME, _UNKNOWN = b"1", b"0"


@dataclass(eq=False)
class _Stranger:
    """An accepted connection whose peer has not authenticated yet."""

    socket: socket.socket
    turned_away: bool = False


def open_endpoint(
    sites: Mapping[str, SiteKeys],
    identity: Identity,
    number: int,
    ranks: int,
    address: str,
    timeouts: Timeouts,
    congestion: str | None = None,
) -> LinkEndpoint:
    """Open the endpoint of one rank.

    Args:
        sites: The run file's `[sites.NAME]` sections by name.
        identity: Certificate and key of this rank's site.
        number: Number of the rank at its site: stage x shards + shard.
        ranks: Number of ranks of the site.
        address: Interface name or IP address to listen on.
        timeouts: Time limits of the run.
        congestion: TCP congestion control between sites; None: the machine's default.

    Raises:
        ConfigError: The site's keys are malformed, or the rank cannot listen as they say.
    """
    door = door_of(identity.site, sites[identity.site], number, ranks)
    return LinkEndpoint(identity, door, address, timeouts, congestion=congestion)


def check_ports(name: str, site: SiteKeys, ranks: int, address: str) -> None:
    """Check that all ranks of a site on this machine can listen at the ports of the run file.

    `address` is the interface name or IP address that the ranks will listen on. Raises
    `ConfigError` if a port cannot be used.
    """
    doors = [door_of(name, site, number, ranks) for number in range(ranks)]
    if site.ports is not None:
        host = interface_address(name, address)
        for door in doors:
            listener_at(name, host, door.bind_port).close()


class LinkEndpoint:
    """Accepts and dials the connections of one rank's links, until `close`. Thread-safe."""

    def __init__(
        self,
        identity: Identity,
        door: Door,
        address: str,
        timeouts: Timeouts,
        congestion: str | None = None,
    ) -> None:
        """Listen, and start the thread that accepts connections.

        Args:
            identity: Certificate and key of this rank's site.
            door: Listening port and public address.
            address: Interface name or IP address to listen on.
            timeouts: Time limits of the run.
            congestion: TCP congestion control between sites; None: the machine's default.

        Raises:
            ConfigError: The port is taken, `address` is not an address of this machine, or other
                sites could not reach it.
        """
        self.site = identity.site
        self.timeouts = timeouts
        self._authority = identity.authority
        self._chosen = door.chosen
        self._congestion = congestion
        self._server, self._client = contexts(identity)
        self._lock = threading.Lock()
        self._routes: dict[str, dict[str, Link]] = {}
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._strangers: Strangers[_Stranger] = Strangers()
        host = interface_address(self.site, address)
        if door.host is None and ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(
                f"sites.{self.site}.interface: {host} is no address that others could reach; "
                f"set sites.{self.site}.advertise"
            )
        self._listener = listener_at(self.site, host, door.bind_port)
        port = int(self._listener.getsockname()[1])
        self.host, self.port = door.host or host, door.port or port
        self._start(self._accept, name="links-door")
        log.info("links: listens at %s:%d, reached as %s:%d", host, port, self.host, self.port)

    def announcement(self) -> Announcement:
        """Return an announcement of this rank for a new group, with a new random route."""
        return Announcement(self.host, self.port, secrets.token_hex(16), self._chosen)

    def offer(self, route: str, links: Mapping[str, Link]) -> None:
        """Attach accepted connections that name `route` to the link of their site in `links`."""
        with self._lock:
            self._routes[route] = dict(links)

    def withdraw(self, route: str) -> None:
        """Refuse new connections that name `route`."""
        with self._lock:
            self._routes.pop(route, None)

    def dial(self, site: str, peer: Announcement) -> SecureStream:
        """Connect to `site` at the announced address; return the accepted connection.

        Raises `UnreachableError` if the peer cannot be reached or no longer has the group, and
        `UnauthenticatedPeerError` if the other end is not `site` or rejects this site.
        """
        limit = self.timeouts.dial
        try:
            connection = socket.create_connection((peer.host, peer.port), timeout=limit)
        except (OSError, ValueError) as error:  # ValueError: the announced host may be any text
            gone = isinstance(error, ConnectionRefusedError)
            raise UnreachableError(_reason(error), gone) from None
        stream = self._secured(connection, server_side=False)
        with contextlib.ExitStack() as held:
            held.callback(stream.close)
            try:
                stream.handshake(limit)
                found = site_of(stream.certificate, self._authority, _now())
                if found != site:
                    raise UnauthenticatedPeerError(f"site {found} answers at this address")
                stream.send(peer.route.encode())
                answer = stream.receive(1, limit)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                raise UnreachableError(_reason(error)) from None
            except ssl.SSLError as error:
                raise UnauthenticatedPeerError(
                    f"no rank of this run answers ({_reason(error)})"
                ) from None
            except OSError as error:
                raise UnreachableError(_reason(error)) from None
            if answer != _WELCOME:
                why = "its group is closed" if answer else "the peer closed the connection"
                raise UnreachableError(why, gone=bool(answer))
            held.pop_all()
        return stream

    def refuses(self, peer: Announcement) -> bool:
        """Return True if the announced address refuses connections: the process has ended."""
        try:
            with socket.create_connection((peer.host, peer.port), timeout=1.0):
                return False
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):
            return False

    def close_links(self, links: Sequence[Link]) -> None:
        """Close links in background threads. Does not wait for them; `close` waits."""
        for link in links:
            self._start(link.close, name=f"close-{link.site}")

    def close(self) -> None:
        """Close all links and end all threads, after data already sent has been acknowledged.

        Waits at most `timeouts.parting` + 1 seconds for the links, and then at most
        `timeouts.greeting` seconds for other threads.
        """
        with self._lock:
            left = [link for links in self._routes.values() for link in links.values()]
            self._routes.clear()
        self.close_links(left)
        with self._lock:
            closing = [each for each in self._threads if each.name.startswith("close-")]
        _join(closing, self.timeouts.parting + 1.0)
        with self._lock:
            self._closed = True
            for item in (self._listener, *self._open):
                _shut(item)
            threads = list(self._threads)
        _join(threads, self.timeouts.greeting)

    def _start(self, function: Callable[..., None], *arguments: object, name: str) -> None:
        def run() -> None:
            try:
                function(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            # Together, since `close` waits for all threads, and none can be waited for unstarted.
            thread.start()
            self._threads.add(thread)

    def _accept(self) -> None:
        with contextlib.closing(self._listener):
            while not self._closed:
                try:
                    connection, where = self._listener.accept()
                except OSError as error:
                    if not self._closed:
                        log.warning("links: a connection could not be accepted: %s", error)
                        time.sleep(_OUT_OF_FILES_PAUSE)
                    continue
                stranger = _Stranger(connection)
                with self._lock:
                    self._open.add(connection)
                    oldest = self._strangers.add(stranger, where[0], time.monotonic())
                    if oldest is not None:
                        # The shutdown wakes the thread of this connection, which closes it.
                        oldest.turned_away = True
                        _shut(oldest.socket)
                self._start(self._meet, stranger, where[0], name="links-from")

    def _meet(self, stranger: _Stranger, where: str) -> None:
        """Authenticate an accepted connection, and attach it to the link that its route names."""
        stream: SecureStream | None = None
        try:
            self._first_word(stranger.socket)
            stream = self._secured(stranger.socket, server_side=True)
            link = self._greet(stream)
            with self._lock:
                self._strangers.discard(stranger)
                self._open.discard(stranger.socket)
                kept = not stranger.turned_away and not self._closed
            if not kept:
                raise ConnectionError("too many unauthenticated connections")
            link.attach(stream)
        except (ExchangeError, OSError) as error:
            # With such a connection a peer checks that this process is alive (`refuses`).
            silent = stream is None and isinstance(error, ConnectionError)
            with self._lock:
                self._strangers.discard(stranger)
                self._open.discard(stranger.socket)
            if stream is not None:
                stream.close()
            stranger.socket.close()
            if not self._closed:
                why = (
                    "too many unauthenticated connections"
                    if stranger.turned_away
                    else _reason(error)
                )
                level = logging.DEBUG if silent else logging.WARNING
                log.log(level, "links: refused a connection from %s: %s", where, why)

    def _first_word(self, connection: socket.socket) -> None:
        connection.settimeout(min(FIRST_WORD, self.timeouts.greeting))
        if self._closed or not connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the peer closed the connection before it sent anything")

    def _greet(self, stream: SecureStream) -> Link:
        limit = self.timeouts.greeting
        stream.handshake(limit)
        site = site_of(stream.certificate, self._authority, _now())
        name = stream.receive(_ROUTE_BYTES, limit)
        if len(name) < _ROUTE_BYTES:
            raise UnauthenticatedPeerError(
                f"site {site} closed the connection before it named a group"
            )
        with self._lock:
            link = self._routes.get(name.decode("ascii", "replace"), {}).get(site)
        if link is None:
            stream.send(_UNKNOWN)
            raise UnauthenticatedPeerError(
                f"site {site} asks for a group that this rank does not have with it"
            )
        stream.send(_WELCOME)
        return link

    def _secured(self, connection: socket.socket, *, server_side: bool) -> SecureStream:
        """Set options on a TCP connection and wrap it in TLS, before the handshake."""
        try:
            tune(connection, self.timeouts.link / 4)
            if self._congestion is not None:
                set_congestion(connection, self._congestion)
        except OSError as error:
            connection.close()
            raise UnreachableError(_reason(error)) from None
        context = self._server if server_side else self._client
        return SecureStream(connection, context, server_side=server_side)


def listener_at(site: str, host: str, port: int) -> socket.socket:
    """Open a listening socket for `site`.

    Raises `ConfigError` if the port is taken or not allowed, or if `host` is not an address of this
    machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f'interface "{host}" cannot be used ({reason}); set network.interface or '
                f"sites.{site}.interface to an address of this machine"
            ) from None
        raise ConfigError(
            f"sites.{site}.ports: cannot listen on port {port} of {host} ({reason}); choose "
            f"other ports or another sites.{site}.interface, or end the process that uses the port"
        ) from None


def _shut(item: socket.socket) -> None:
    """Shut a socket down, so that the thread that waits on the socket wakes."""
    with contextlib.suppress(OSError):
        item.shutdown(socket.SHUT_RDWR)


def _join(threads: Iterable[threading.Thread], limit: float) -> None:
    """Wait for all threads to end, at most `limit` seconds in all."""
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error.strerror or 'ended'}".replace("_", " ").lower()
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
