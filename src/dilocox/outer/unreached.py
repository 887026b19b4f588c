"""Whom a rank has no link to, when a group could not be formed.

Gloo says little: it names the address of a peer that refuses, and nothing of one that is silent.
The rest follows from the addresses that the members gave and from this process's own connections.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence

from dilocox.errors import ExchangeError
from dilocox.outer.sockets import connections
from dilocox.outer.tunnel_addresses import blob_address

_ADDRESS_KEY = re.compile(r"\d+/(\d+)")
"""Under which a member, by its number, tells the others where its Gloo listens."""
_REMOTE = re.compile(r"remote=\[([^\]]*)\]:(\d+)")
"""How Gloo names the peer that it could not connect to."""

Address = tuple[str, int]
"""(host, port)."""


class UnreachedError(ExchangeError):
    """A group could not be formed. `sites`: to whom this rank has no link, as far as it knows."""

    def __init__(self, text: str, sites: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.sites = list(sites)


class Links:
    """What one rank knows of the links of a group that it tried to form.

    `sites` are the members in the group's order; `found` is what the store has answered, by key.
    """

    def __init__(self, sites: Sequence[str], me: str, found: Mapping[str, bytes]) -> None:
        self._sites, self._me = list(sites), me
        self._others = [site for site in sites if site != me]
        self._addresses = self._listed(found)

    def _listed(self, found: Mapping[str, bytes]) -> dict[str, Address]:
        """Where the members' Gloo listens, as it is seen here, as far as that can be read."""
        addresses: dict[str, Address] = {}
        for key, blob in found.items():
            site = self._site_of(key)
            try:
                if site is not None:
                    addresses[site] = blob_address(blob)
            except ExchangeError:
                continue  # IPv6: nobody is named by it
        return addresses

    def _site_of(self, key: str) -> str | None:
        match = _ADDRESS_KEY.fullmatch(key)
        known = match is not None and int(match[1]) < len(self._sites)
        return self._sites[int(match[1])] if match is not None and known else None

    def not_come(self, asked: str) -> list[str]:
        """Whose address under the key `asked` was waited for, or leads nowhere."""
        site = self._site_of(asked)
        return self._others if site is None else [site]

    def refused(self, text: str) -> list[str]:
        """Whom Gloo's error `text` names; all others if it names none of them."""
        match = _REMOTE.search(text)
        if match is None:
            return self._others
        # As it prints ports, too, their bytes stand in the order of the network.
        named = [(match[1], port) for port in (int(match[2]), _turned(int(match[2])))]
        return [s for s in self._others if self._addresses.get(s) in named] or self._others

    def silent(self, linked: set[Address]) -> list[str]:
        """Whom this rank had to connect to and is not `linked` to; if it is to all of them, those
        that had to connect to it, since one of them has not."""
        mine = self._addresses.get(self._me)
        dialled = [
            site
            for site in self._others
            if mine is not None
            and site in self._addresses
            and _rank(mine) > _rank(self._addresses[site])
        ]
        failed = [site for site in dialled if self._addresses[site] not in linked]
        return failed or [site for site in self._others if site not in dialled] or self._others


def _rank(address: Address) -> tuple[bytes, int]:
    """What Gloo compares: of two, the greater one connects."""
    return socket.inet_aton(address[0]), _turned(address[1])


def _turned(port: int) -> int:
    """A port whose bytes are in the order of the network, as a number of this machine."""
    return int(struct.unpack("=H", struct.pack("!H", port & 0xFFFF))[0])


def far_ends() -> set[Address]:
    """Far ends of this process's TCP connections; none where there is no /proc."""
    found: set[Address] = set()
    for descriptor in connections():
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                host, port = connection.getpeername()[:2]
                found.add((str(host), int(port)))
        except OSError:
            continue  # closed meanwhile
    return found
