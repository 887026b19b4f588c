"""WireGuard configurations for the sites of a run: one private network that they all share.

The format is that of wg-quick(8); keys are X25519 (RFC 7748), written in base64.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dilocox.errors import ConfigError

INTERFACE = "dilocox0"
"""Name of the interface at every site: that of the file, without its ending."""
PORT = 51820
"""UDP port at every site whose endpoint names no other."""
KEEP_ALIVE = 25
"""Seconds between packets that keep a NAT's mapping open (the value that wg(8) recommends)."""
MOST = 253
"""Sites that a network of 256 addresses holds."""


@dataclass(frozen=True)
class Peer:
    """One site in the private network. `endpoint`: HOST:PORT, or none if it can only dial."""

    site: str
    private: str
    public: str
    address: str
    endpoint: str | None


def new_key() -> bytes:
    """A private key, 32 bytes."""
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )


def public_of(private: bytes) -> bytes:
    """The public key of a private key, both 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def subnet_of(run: str) -> str:
    """The first three numbers of the run's private addresses, made from its name.

    So two runs on one machine seldom have the same.
    """
    digest = hashlib.sha256(run.encode()).digest()
    return f"10.{64 + digest[0] % 128}.{digest[1]}"


def peers_of(run: str, sites: Sequence[str], endpoints: Mapping[str, str]) -> list[Peer]:
    """A key, an address and an endpoint for every site, in order.

    `endpoints`: HOST or HOST:PORT by site, of those that can be reached from outside. Raises
    `ConfigError` for one that is no site's, and for two sites of which neither can be reached.
    """
    unknown = [name for name in endpoints if name not in sites]
    if unknown:
        raise ConfigError(
            f"--endpoint {unknown[0]}: not in the run file, which names: {', '.join(sites)}"
        )
    hidden = [name for name in sites if name not in endpoints]
    if len(hidden) > 1:
        raise ConfigError(
            f"sites {' and '.join(hidden)}: neither has an --endpoint, so they could not reach "
            "each other; forward a UDP port to one and give --endpoint NAME=HOST:PORT"
        )
    if len(sites) > MOST:
        raise ConfigError(f"{len(sites)} sites: WireGuard configurations are for {MOST} at most")
    made = []
    for number, site in enumerate(sites, start=1):
        private = new_key()
        made.append(
            Peer(
                site,
                _text(private),
                _text(public_of(private)),
                f"{subnet_of(run)}.{number}",
                _with_port(site, endpoints[site]) if site in endpoints else None,
            )
        )
    return made


def configuration(me: Peer, peers: Sequence[Peer]) -> str:
    """The text of one site's configuration file."""
    port = PORT if me.endpoint is None else int(me.endpoint.rpartition(":")[2])
    lines = [
        f"# site {me.site}: as root, wg-quick up ./{INTERFACE}.conf",
        "[Interface]",
        f"PrivateKey = {me.private}",
        f"Address = {me.address}/24",
        f"ListenPort = {port}",
    ]
    for peer in peers:
        if peer.site == me.site:
            continue
        lines += ["", "[Peer]", f"# site {peer.site}", f"PublicKey = {peer.public}"]
        lines.append(f"AllowedIPs = {peer.address}/32")
        if peer.endpoint is not None:
            lines += [f"Endpoint = {peer.endpoint}", f"PersistentKeepalive = {KEEP_ALIVE}"]
    return "\n".join(lines) + "\n"


def write(folder: Path, run: str, sites: Sequence[str], endpoints: Mapping[str, str]) -> list[Path]:
    """Write `FOLDER/SITE/dilocox0.conf` for every site, readable by the owner only.

    Raises `ConfigError` if there are some already: their keys may be in use.
    """
    peers = peers_of(run, sites, endpoints)
    places = [folder / peer.site / f"{INTERFACE}.conf" for peer in peers]
    for place in places:
        if place.exists():
            raise ConfigError(
                f"{place}: there already, and its key may be in use; choose another folder, or "
                "delete this one"
            )
    for peer, place in zip(peers, places, strict=True):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(configuration(peer, peers))
        except OSError as error:
            raise ConfigError(
                f"{place}: cannot be written ({error.strerror}); choose another folder"
            ) from None
    return places


def parse_endpoints(items: Sequence[str]) -> dict[str, str]:
    """`NAME=HOST[:PORT]` texts by name. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, host = item.partition("=")
        if not equals or not name or not host:
            raise ConfigError(f"--endpoint {item!r}: write it as NAME=HOST or NAME=HOST:PORT")
        found[name] = host
    return found


def _with_port(site: str, endpoint: str) -> str:
    """HOST:PORT; an IPv6 address has brackets, as wg(8) wants it."""
    bare = endpoint.count(":") > 1 and not endpoint.startswith("[")
    if bare or ":" not in endpoint.rpartition("]")[2]:
        return f"[{endpoint}]:{PORT}" if bare else f"{endpoint}:{PORT}"
    port = endpoint.rpartition(":")[2]
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--endpoint {site}={endpoint}: {port!r} is no port (1 to 65535)")
    return endpoint


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()
