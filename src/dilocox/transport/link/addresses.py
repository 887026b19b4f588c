"""Addresses under which other sites reach a rank, as pure functions.

The module reads the run-file keys of a site's network, and encodes and decodes announcements.
"""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import asdict, dataclass
from typing import Protocol

from dilocox.errors import ConfigError, ExchangeError

_MAGIC = b"dilocox-link 1 "
_ROUTE = re.compile(r"[0-9a-f]{32}")


class SiteKeys(Protocol):
    """The keys of `[sites.NAME]` about a site's network."""

    @property
    def advertise(self) -> str | None:
        """`HOST`, or `HOST:FIRST` if the ports differ outside the site's router; None: not set."""

    @property
    def ports(self) -> str | None:
        """`FIRST-LAST`, one port per rank; None: the system picks free ports."""


@dataclass(frozen=True)
class Door:
    """Listening port and public address of one rank."""

    bind_port: int
    """Port that the rank listens on; 0: the system picks a free port."""
    host: str | None
    """Address under which other sites reach the rank; None: the address that it listens on."""
    port: int | None
    """Port under which other sites reach the rank; None: the port that it listens on."""
    chosen: bool
    """True if the run file sets `advertise` or `ports` for this site."""


@dataclass(frozen=True)
class Announcement:
    """The address that a rank announces to the members of a group."""

    host: str
    port: int
    route: str
    """32 hex digits that name the group at this rank."""
    chosen: bool
    """True if the run file sets `advertise` or `ports` for this rank's site."""


def door_of(name: str, site: SiteKeys, number: int, ranks: int) -> Door:
    """Return the listening port and public address of one rank of a site.

    Args:
        name: Name of the site, for messages.
        site: The site's run-file keys.
        number: Number of the rank at its site: stage x shards + shard.
        ranks: Number of ranks of the site.

    Raises:
        ConfigError: A key is malformed, or does not have a port for every rank.
    """
    ports = None if site.ports is None else parse_ports(name, site.ports, ranks)
    host, first = (None, None) if site.advertise is None else parse_advertise(name, site.advertise)
    if first is not None and ports is None:
        raise ConfigError(
            f"sites.{name}.advertise: {site.advertise!r} names a port; set sites.{name}.ports to "
            "the ports that are forwarded to"
        )
    if first is not None and first + ranks - 1 > 65535:
        raise ConfigError(
            f"sites.{name}.advertise: {ranks} ranks from port {first} on go beyond 65535; begin "
            "lower"
        )
    return Door(
        bind_port=0 if ports is None else ports[number],
        host=host,
        port=None if first is None else first + number,
        chosen=bool(site.advertise or site.ports),
    )


def parse_ports(name: str, text: str, ranks: int) -> range:
    """Parse `FIRST-LAST` to the ports from `FIRST` to `LAST`, both included.

    Raises `ConfigError` if the text is malformed or the ports are fewer than `ranks`.
    """
    key = f"sites.{name}.ports"
    match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f'{key}: {text!r} is not a port range; write it as "29500-29507"')
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last <= 65535:
        raise ConfigError(
            f"{key}: {text!r} is empty or outside 1 to 65535; write the lower port first"
        )
    if last - first + 1 < ranks:
        count = last - first + 1
        raise ConfigError(
            f"{key}: {count} {'port' if count == 1 else 'ports'} for {ranks} ranks; "
            f"give at least {ranks}"
        )
    return range(first, last + 1)


def parse_advertise(name: str, text: str) -> tuple[str, int | None]:
    """Parse `HOST`, `HOST:FIRST`, `[IPV6]:FIRST` or an IPv6 address to (host, first port).

    The port is None if the text has none. Raises `ConfigError` if the text is malformed.
    """
    text = text.strip()
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", text, re.ASCII)
    host = match[1].strip("[]") if match else text
    port = int(match[2]) if match and match[2] else None
    try:
        if match is None or ":" in host:
            host = str(ipaddress.IPv6Address(host))
        if port is not None and not 1 <= port <= 65535:
            raise ValueError("no such port")
    except ValueError:
        raise ConfigError(
            f"sites.{name}.advertise: {text!r} is not an address; write HOST, or HOST:PORT for the "
            "first of the site's outside ports"
        ) from None
    return host, port


def connects(mine: Announcement, my_index: int, peer: Announcement, peer_index: int) -> bool:
    """Return True if this rank connects to the peer, False if the peer connects to this rank.

    Both ends compute opposite answers. If the run file sets the address of only one of the two
    sites, the other site connects, so that it may be behind NAT. Otherwise the rank that comes
    first in the group connects.
    """
    if mine.chosen != peer.chosen:
        return peer.chosen
    return my_index < peer_index


def announce(announcement: Announcement) -> bytes:
    """Encode an announcement as bytes."""
    return _MAGIC + json.dumps(asdict(announcement)).encode()


def read_announcement(value: bytes) -> Announcement:
    """Decode the bytes of `announce`. Raises `ExchangeError` if they are not an announcement."""
    try:
        if not value.startswith(_MAGIC):
            raise ValueError("not an announcement")
        found = Announcement(**json.loads(value.removeprefix(_MAGIC)))
        whole = (
            isinstance(found.host, str)
            and 0 < len(found.host) <= 255
            and type(found.port) is int
            and 1 <= found.port <= 65535
            and isinstance(found.route, str)
            and _ROUTE.fullmatch(found.route) is not None
            and type(found.chosen) is bool
        )
        if not whole:
            raise ValueError("a field is out of range")
    except (ValueError, TypeError, RecursionError) as error:
        raise ExchangeError(
            f"a peer's announcement cannot be read ({error}); run the same dilocox version at all "
            "sites"
        ) from None
    return found
