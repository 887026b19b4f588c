"""Limits connections that have not authenticated yet, and chooses which of them to close."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

AT_ONCE = 64
"""Number of unauthenticated connections older than `GRACE` that may stay open."""
BURST = 256
"""Largest number of unauthenticated connections. This number is above `AT_ONCE`, since all ranks of
a site may connect at the same moment."""
GRACE = 2.0
"""Seconds within which a member of the run presents its certificate."""

T = TypeVar("T")


@dataclass
class _Seen(Generic[T]):
    item: T
    network: str
    since: float


class Strangers(Generic[T]):
    """Unauthenticated connections, in order of arrival. Not thread-safe.

    When there are too many, it names the oldest connection of the network with the most
    connections. So an attacker with one address displaces only its own connections.
    """

    def __init__(self, at_once: int = AT_ONCE, burst: int = BURST, grace: float = GRACE) -> None:
        self._at_once, self._burst, self._grace = at_once, burst, grace
        self._seen: list[_Seen[T]] = []

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, item: T, address: str, now: float) -> T | None:
        """Add connection `item` from `address` at time `now` (monotonic seconds).

        Returns the connection that the caller must close, or None. The returned connection has
        been removed from this collection.
        """
        gone = self._one_too_many(now)
        self._seen.append(_Seen(item, _network(address), now))
        if gone is None:
            return None
        self._seen.remove(gone)
        return gone.item

    def discard(self, item: T) -> None:
        """Remove `item`, which has authenticated or is closed."""
        self._seen = [seen for seen in self._seen if seen.item is not item]

    def _one_too_many(self, now: float) -> _Seen[T] | None:
        late = [seen for seen in self._seen if now - seen.since >= self._grace]
        if len(self._seen) >= self._burst:
            late = self._seen
        elif len(late) < self._at_once:
            return None
        counts = Counter(seen.network for seen in late)
        most = max(counts.values())
        return next(seen for seen in late if counts[seen.network] == most)


def _network(address: str) -> str:
    """Returns the network by which connections are counted.

    For IPv4 the network is the address itself, for IPv6 the /64, since one machine may own a whole
    /64.
    """
    try:
        found = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((found, 64), strict=False))
