"""Addresses of the tunnel between sites, as pure functions: run-file keys, announcements, and the
blobs in which Gloo tells where it listens."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from dilocox.errors import ConfigError, ExchangeError

GLOO_HOST = "127.0.0.2"
"""Where Gloo listens in tunnel mode.

Of two ranks the one that sees itself at the greater address connects, the other one waits. So a
peer that this rank is to connect to is shown below this address, and one to wait for above it.
"""
CONNECT_HOST, WAIT_HOST = "127.0.0.1", "127.0.0.3"

_MAGIC = b"dilocox-tunnel 1 "
_STORAGE = 128 + 8
"""A `sockaddr_storage` and the sequence number that follows it, in bytes."""
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
    """What a rank tells the members of a group about its tunnel."""

    host: str
    port: int
    route: str
    """32 hex digits: names the group at that rank."""
    chosen: bool
    """The run file says how that site is reached."""


def wanted(sites: Mapping[str, SiteKeys]) -> bool:
    """True if the run's exchange goes through tunnels: a site sets `advertise` or `ports`."""
    return any(site.advertise or site.ports for site in sites.values())


def check_sites(sites: Mapping[str, SiteKeys], ranks: int) -> None:
    """Raise the `ConfigError` that a rank of any of `sites` would meet."""
    for name, site in sites.items():
        door_of(name, site, 0, ranks)


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


def announce(announcement: Announcement, blob: bytes) -> bytes:
    """An announcement with Gloo's own blob behind it."""
    return _MAGIC + json.dumps(asdict(announcement)).encode() + b"\n" + blob


def is_announcement(value: bytes) -> bool:
    """True for what `announce` made."""
    return value.startswith(_MAGIC)


def read_announcement(value: bytes) -> tuple[Announcement, bytes]:
    """What `announce` was given. Raises `ExchangeError` for anything else."""
    head, newline, blob = value.removeprefix(_MAGIC).partition(b"\n")
    try:
        if not is_announcement(value) or not newline:
            raise ValueError("not an announcement")
        found = Announcement(**json.loads(head))
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
    except (ValueError, TypeError) as error:
        raise ExchangeError(
            f"a peer's tunnel announcement cannot be read ({error}); run the same dilocox version "
            "at all sites"
        ) from None
    return found, blob


def blob_address(blob: bytes) -> tuple[str, int]:
    """IPv4 address and port in a Gloo blob. Raises `ExchangeError` if it is laid out otherwise."""
    at = _address_offset(blob)
    port, host = struct.unpack_from("!H4s", blob, at + 2)
    return socket.inet_ntoa(host), port


def with_address(blob: bytes, host: str, port: int) -> bytes:
    """The blob with another IPv4 address and port. Raises `ExchangeError`."""
    at = _address_offset(blob)
    address = struct.pack("!H4s", port, socket.inet_aton(host))
    return blob[: at + 2] + address + blob[at + 2 + len(address) :]


def _address_offset(blob: bytes) -> int:
    """Layout: length and host name; length and sockaddr with sequence number; ids of 8 B each."""
    try:
        (name_bytes,) = struct.unpack_from("=Q", blob, 0)
        (length,) = struct.unpack_from("=Q", blob, 8 + name_bytes)
        at = 16 + int(name_bytes)
        (family,) = struct.unpack_from("=H", blob, at)
    except (struct.error, OverflowError):
        length, at, family = 0, 0, 0
    rest = len(blob) - at - _STORAGE
    if length != _STORAGE or family != socket.AF_INET or rest < 0 or rest % 8:
        raise ExchangeError(
            f"a Gloo address of {len(blob)} B has another layout than this dilocox knows; use the "
            "PyTorch version that it asks for, or leave out sites.*.advertise and sites.*.ports"
        )
    return at
