"""Where the other sites reach a rank, as pure functions: run-file keys and announcements."""

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
    """What `[sites.NAME]` says about a site's network."""

    @property
    def advertise(self) -> str | None:
        """`HOST`, or `HOST:FIRST` if the ports are others outside."""

    @property
    def ports(self) -> str | None:
        """`FIRST-LAST`, one port per rank."""


@dataclass(frozen=True)
class Door:
    """Where one rank is reached."""

    bind_port: int
    """Port that it listens on; 0 takes a free one."""
    host: str | None
    """Address under which the others reach it; none: the one that it listens on."""
    port: int | None
    """Port under which the others reach it; none: the one that it listens on."""
    chosen: bool
    """The run file says how this site is reached."""


@dataclass(frozen=True)
class Announcement:
    """What a rank tells the members of a group about the way to it."""

    host: str
    port: int
    route: str
    """32 hex digits: names the group at that rank."""
    chosen: bool
    """The run file says how that site is reached."""


def door_of(name: str, site: SiteKeys, number: int, ranks: int) -> Door:
    """The door of rank `number` (stage x shards + shard) of `ranks` at a site.

    Raises `ConfigError` for keys that cannot be used.
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
    """The ports of `FIRST-LAST`, both included. Raises `ConfigError`."""
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
    """Host and first port of `HOST`, `HOST:FIRST`, `[IPV6]:FIRST` or an IPv6 address.

    Raises `ConfigError`.
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
    """True if this side of a pair connects; both sides come to opposite answers.

    A site whose way in is chosen by the run file is connected to, so that a site without one may
    stand behind NAT; between equals the one named first in the group connects.
    """
    if mine.chosen != peer.chosen:
        return peer.chosen
    return my_index < peer_index


def announce(announcement: Announcement) -> bytes:
    """An announcement as bytes."""
    return _MAGIC + json.dumps(asdict(announcement)).encode()


def read_announcement(value: bytes) -> Announcement:
    """What `announce` was given. Raises `ExchangeError` for anything else."""
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
