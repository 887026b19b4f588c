"""IP addresses of this machine's network interfaces."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from dilocox.errors import ConfigError

_SIOCGIFADDR = 0x8915
_V6 = Path("/proc/net/if_inet6")
_LINK_LOCAL = "20"
"""Scope in `_V6` of link-local addresses, which need a zone, so other machines cannot use them."""


def interface_address(site: str, address: str) -> str:
    """Return the IP address of an interface of this machine, IPv4 if the interface has one.

    `address` is an interface name, or an IP address, which is returned in normal form. Raises
    `ConfigError`, naming `site`, if the interface has no address.
    """
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    found = _ipv4(address) or _ipv6(address)
    if found is None:
        raise ConfigError(
            f'interface "{address}" has no address here; set network.interface or '
            f"sites.{site}.interface to one that has, or to an IP address of this machine"
        )
    return found


def _ipv4(name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def _ipv6(name: str) -> str | None:
    if not _V6.exists():
        return None
    for line in _V6.read_text(encoding="ascii").splitlines():
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope != _LINK_LOCAL:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
