"""Exchange through tunnels: for sites on several networks or behind NAT.

With `advertise` or `ports` at any site of a run, every rank listens at one public port, and all
groups of the rank run through it, under TLS that both ends certify: in this mode the exchange is
authenticated and encrypted. Gloo itself stays on loopback. What its peers tell each other over the
coordinator is rewritten: each finds the others on loopback, where the rank's carrier takes the
bytes up (tunnel_carrier.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import re
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

from dilocox.errors import ConfigError, ExchangeError
from dilocox.outer.coordinator.identity import Identity
from dilocox.outer.coordinator.timeouts import Timeouts
from dilocox.outer.groups import EpochChangedError, KeyValue, PeerGroup
from dilocox.outer.tunnel_addresses import (
    CONNECT_HOST,
    GLOO_HOST,
    WAIT_HOST,
    Announcement,
    Door,
    SiteKeys,
    announce,
    blob_address,
    connects,
    door_of,
    is_announcement,
    read_announcement,
    wanted,
    with_address,
)
from dilocox.outer.tunnel_carrier import Carrier, UnreachableError, listener_at
from dilocox.outer.tunnel_process import start_carrier
from dilocox.outer.tunnel_tls import StrangerError
from dilocox.outer.unreached import UnreachedError

log = logging.getLogger(__name__)

_PAUSE = 0.2
_GLOO_ADDRESS_KEY = re.compile(r"\d+/(\d+)")
_SIOCGIFADDR = 0x8915


def open_tunnel(
    sites: Mapping[str, SiteKeys],
    identity: Identity,
    number: int,
    ranks: int,
    address: str,
    timeouts: Timeouts,
    congestion: str | None = None,
) -> Tunnel | None:
    """The tunnel of rank `number` of `ranks` of `identity`'s site; none if the run uses none.

    `sites` is the run file's; `address` the interface name or IP address to listen on. To be
    called before this process has threads or a CUDA context. Raises `ConfigError`.
    """
    if not wanted(sites):
        return None
    door = door_of(identity.site, sites[identity.site], number, ranks)
    return Tunnel(identity, door, address, timeouts, congestion)


def check_ports(name: str, site: SiteKeys, ranks: int, address: str) -> None:
    """Raise the `ConfigError` that a rank of a site on this machine would meet as it listens.

    `address` is the interface name or IP address that the site's exchange binds to.
    """
    doors = [door_of(name, site, number, ranks) for number in range(ranks)]
    if site.ports is not None:
        host = interface_address(name, address)
        for door in doors:
            listener_at(name, host, door.bind_port).close()


class Tunnel:
    """One rank's tunnel, for all of its groups. Thread-safe."""

    def __init__(
        self,
        identity: Identity,
        door: Door,
        address: str,
        timeouts: Timeouts,
        congestion: str | None = None,
    ) -> None:
        """`congestion`: TCP congestion control of what it carries, if not the machine's.

        Raises `ConfigError` if the door's port is taken or `address` is not this machine's."""
        self.site = identity.site
        self._dial = timeouts.dial
        host = interface_address(identity.site, address)
        if door.host is None and ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(
                f"sites.{self.site}.interface: {host} is no address that others could reach; "
                f"set sites.{self.site}.advertise"
            )
        self._process, self._carrier = start_carrier(identity, timeouts, congestion)
        try:
            port = self._carrier.listen(host, door.bind_port)
        except BaseException:
            self._process.shutdown()
            raise
        self.host, self.port = door.host or host, door.port or port
        self._chosen = door.chosen
        log.info("tunnel: listens at %s:%d, reached as %s:%d", host, port, self.host, self.port)

    def group(
        self,
        kv: KeyValue,
        name: str,
        sites: Sequence[str],
        timeout: float,
        silence: float,
        cancelled: Callable[[], bool],
    ) -> PeerGroup:
        """A `PeerGroup` of this rank, through the tunnel; raises what `PeerGroup` does.

        It also names a peer that cannot be reached as announced.
        """
        passage = Passage(
            self._carrier, self._announcement(), sites, self.site, timeout, self._dial, cancelled
        )
        try:
            return TunnelGroup(passage, kv, name, sites, self.site, timeout, silence, cancelled)
        except BaseException:
            passage.close()
            raise

    def connections(self) -> int:
        """Connections that are carried at the moment, or about to be."""
        return self._carrier.connections()

    @property
    def carrier_pid(self) -> int:
        """Process that carries the bytes."""
        return self._process.pid

    def close(self) -> None:
        """End all connections and the carrier's process; what was sent still goes out."""
        # A carrier that has died has nothing to close.
        with contextlib.suppress(OSError, EOFError):
            self._carrier.close()
        self._process.shutdown()

    def _announcement(self) -> Announcement:
        return Announcement(self.host, self.port, secrets.token_hex(16), self._chosen)


class Passage:
    """One group's way through a tunnel: its `Rewrite` functions and its route."""

    def __init__(
        self,
        carrier: Carrier,
        mine: Announcement,
        sites: Sequence[str],
        me: str,
        timeout: float,
        dial: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """`dial`: seconds of one try to reach a peer, `timeout`: of all tries."""
        self._carrier, self._mine = carrier, mine
        self._try = dial
        self._sites, self._index = list(sites), list(sites).index(me)
        self._timeout, self._cancelled = timeout, cancelled
        self._seen: dict[str, bytes] = {}
        self._closed = False

    def on_set(self, key: str, value: bytes) -> bytes:
        """Put the tunnel's announcement before this rank's Gloo address."""
        if not _GLOO_ADDRESS_KEY.fullmatch(key):
            return value
        peers = [site for number, site in enumerate(self._sites) if number != self._index]
        with _carrier_there():
            self._carrier.offer(self._mine.route, blob_address(value)[1], peers)
        return announce(self._mine, value)

    def on_get(self, key: str, value: bytes) -> bytes:
        """A Gloo address at which Gloo finds that peer here.

        Raises `UnreachedError` for a peer that cannot be reached, `EpochChangedError`.
        """
        match = _GLOO_ADDRESS_KEY.fullmatch(key)
        if match is None:
            return value
        index = int(match[1])
        if index >= len(self._sites):
            raise ExchangeError(f"a Gloo address came for member {index} of {len(self._sites)}")
        if not is_announcement(value):
            raise UnreachedError(
                f"site {self._sites[index]} exchanges without a tunnel, this site with one; give "
                "both the same [sites] with advertise and ports"
            )
        if key not in self._seen:
            peer, blob = read_announcement(value)
            self._seen[key] = blob if index == self._index else self._shown(index, peer, blob)
        return self._seen[key]

    def close(self) -> None:
        """Take no new connections; those there are end with Gloo's own."""
        if not self._closed:
            self._closed = True
            # Where the carrier is gone its routes are.
            with contextlib.suppress(OSError, EOFError):
                self._carrier.withdraw(self._mine.route)

    def _shown(self, index: int, peer: Announcement, blob: bytes) -> bytes:
        if not connects(self._mine, self._index, peer, index):
            return with_address(blob, WAIT_HOST, blob_address(blob)[1])
        return with_address(blob, CONNECT_HOST, self._dial(self._sites[index], peer))

    def _dial(self, site: str, peer: Announcement) -> int:
        end = time.monotonic() + self._timeout
        while True:
            if self._cancelled():
                raise EpochChangedError(f"the members changed while {site} was being reached")
            try:
                with _carrier_there():
                    return self._carrier.dial(
                        self._mine.route,
                        site,
                        peer.host,
                        peer.port,
                        peer.route,
                        self._timeout,
                        self._try,
                    )
            except UnreachableError as error:
                if time.monotonic() + _PAUSE >= end:
                    raise UnreachedError(_unreached(site, peer, str(error))) from None
            except StrangerError as error:
                raise UnreachedError(_unreached(site, peer, str(error))) from None
            time.sleep(_PAUSE)


class TunnelGroup(PeerGroup):
    """A `PeerGroup` whose links run through a tunnel."""

    def __init__(
        self,
        passage: Passage,
        kv: KeyValue,
        name: str,
        sites: Sequence[str],
        me: str,
        timeout: float,
        silence: float,
        cancelled: Callable[[], bool],
    ) -> None:
        super().__init__(
            kv,
            name,
            sites,
            me,
            GLOO_HOST,
            timeout,
            silence,
            cancelled,
            passage.on_set,
            passage.on_get,
        )
        # A group that is dropped without `close` withdraws its route too.
        self._withdraw = weakref.finalize(self, passage.close)
        self._withdraw.atexit = False

    def close(self) -> None:
        """Drop the connections; operations under way fail at the peers."""
        super().close()
        self._withdraw()


def form_group(
    tunnel: Tunnel | None,
    kv: KeyValue,
    name: str,
    sites: Sequence[str],
    me: str,
    address: str,
    timeout: float,
    silence: float,
    cancelled: Callable[[], bool],
    congestion: str | None = None,
) -> PeerGroup:
    """A `PeerGroup`, through the tunnel if there is one, else directly from `address`.

    `congestion` counts without a tunnel, which has its own.
    """
    if tunnel is not None:
        return tunnel.group(kv, name, sites, timeout, silence, cancelled)
    return PeerGroup(
        kv,
        name,
        sites,
        me,
        address,
        timeout,
        silence,
        cancelled,
        on_get=direct_on_get,
        congestion=congestion,
    )


def direct_on_get(key: str, value: bytes) -> bytes:
    """The `on_get` of a group without a tunnel: refuses a peer that has one.

    Raises `UnreachedError`.
    """
    if is_announcement(value):
        raise UnreachedError(
            f"a peer exchanges through a tunnel ({read_announcement(value)[0].host}), this site "
            "without; give both the same [sites] with advertise and ports"
        )
    return value


def interface_address(site: str, address: str) -> str:
    """The IP address of an interface; an IP address stays as it is. Raises `ConfigError`."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        request = struct.pack("256s", address.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError as error:
        raise ConfigError(
            f'interface "{address}" has no IPv4 address here ({error.strerror}); set '
            f"sites.{site}.interface to one that has, or to an IP address of this machine"
        ) from None


@contextlib.contextmanager
def _carrier_there() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise ExchangeError(
            f"this rank's tunnel process has ended or cannot work ({error}); see the rank's log"
        ) from None


def _unreached(site: str, peer: Announcement, reason: str) -> str:
    return (
        f"site {site} cannot be reached at {peer.host}:{peer.port}, as it announces ({reason}); "
        f"set sites.{site}.advertise and sites.{site}.ports to where its router lets this site in"
    )
