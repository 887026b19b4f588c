"""Connections that have not shown yet who they are: how many there may be, and which one goes."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

AT_ONCE = 64
"""Strangers that may stay."""
BURST = 256
"""Strangers at the most: a site's ranks may all come in the same moment."""
GRACE = 2.0
"""Seconds in which a member has shown its certificate."""

T = TypeVar("T")


@dataclass
class _Seen(Generic[T]):
    item: T
    network: str
    since: float


class Strangers(Generic[T]):
    """Keeps room for newcomers: the oldest stranger goes, and of the network with the most.

    So an attacker of one address pushes out its own connections. Not thread-safe.
    """

    def __init__(self, at_once: int = AT_ONCE, burst: int = BURST, grace: float = GRACE) -> None:
        self._at_once, self._burst, self._grace = at_once, burst, grace
        self._seen: list[_Seen[T]] = []

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, item: T, address: str, now: float) -> T | None:
        """Take in `item` at the time `now` (monotonic seconds); the stranger to be closed, or None.

        The stranger to be closed is not among these any more.
        """
        gone = self._one_too_many(now)
        self._seen.append(_Seen(item, _network(address), now))
        if gone is None:
            return None
        self._seen.remove(gone)
        return gone.item

    def discard(self, item: T) -> None:
        """`item` is no stranger any more, or gone."""
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
    """IPv4 addresses by themselves, IPv6 ones by their /64, of which one machine has all."""
    try:
        found = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((found, 64), strict=False))
