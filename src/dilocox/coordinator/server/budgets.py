"""What one member may ask of the coordinator, so that none takes it from the others.

Every site has budgets of its own, in proportion to its ranks: requests and bytes by time, events
between two plans, keys of the store. They are far beyond what ranks need. Who exceeds one is
refused; beats are never counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.refusals import Caller, Refused

REQUESTS, REQUEST_BURST = 100.0, 2000.0
"""Requests of a rank per second, and at once."""
BYTES, BYTE_BURST = float(1 << 20), float(32 << 20)
"""Bytes of their bodies per second, and at once."""
ENROLMENTS, ENROLMENT_BURST = 0.5, 100.0
"""Enrolments of a site per second, and at once: each is in the event log and in the record."""
KEYS, KEY_BYTES = 256, 1 << 20
"""Keys of the store for each rank of a site, and bytes of their values."""
EVENTS = {
    "warnings": 32,
    "signed states": 32,
    "checkpoints": 8,
    "lasting keys": 256,
    "digests of pieces": 256,
    "renewals": 2,
    "verdicts": 32,
}
"""By what is counted: so many for each rank of a site from one plan to the next."""
_NEW_ROUND = (e.Planned, e.Started, e.Entered, e.Overtaken, e.Resumed)
"""Events after which sites have more to say."""


class Budgets:
    """What sites have spent. Raises `Refused` with the kind `busy` or `quota`."""

    def __init__(self, ranks: int, now: Callable[[], float] = time.monotonic) -> None:
        """`ranks` of every site; `now`: a monotonic clock."""
        self._ranks, self._now = ranks, now
        self._spent: Counter[tuple[str, str]] = Counter()
        self._left: dict[str, tuple[float, float, float]] = {}
        """By site: requests, bytes, and when that was."""
        self._enrolments: dict[str, tuple[float, float]] = {}
        """By site: enrolments, and when that was."""

    def happened(self, event: e.Event) -> None:
        """An event was logged."""
        if isinstance(event, _NEW_ROUND):
            self._spent.clear()

    def charge(self, caller: Caller, size: int = 0) -> None:
        """A site asks for something with a body of `size` bytes."""
        if caller.operator:
            return
        site, now = caller.site, self._now()
        most = REQUEST_BURST * self._ranks, BYTE_BURST * self._ranks
        requests, bytes_, then = self._left.get(site, (*most, now))
        passed = max(0.0, now - then) * self._ranks
        requests = min(most[0], requests + passed * REQUESTS)
        bytes_ = min(most[1], bytes_ + passed * BYTES)
        enough = requests >= 1.0 and bytes_ >= size
        if enough:
            requests, bytes_ = requests - 1.0, bytes_ - size
        self._left[site] = requests, bytes_, now
        if not enough:
            raise Refused(
                "busy",
                f"site {site}: asks for more than {REQUESTS * self._ranks:g} requests or "
                f"{BYTES * self._ranks / 2**20:g} MiB per second; wait, and ask less often",
            )

    def enrol(self, site: str) -> None:
        """A site is to be let in."""
        now = self._now()
        left, then = self._enrolments.get(site, (ENROLMENT_BURST, now))
        left = min(ENROLMENT_BURST, left + max(0.0, now - then) * ENROLMENTS)
        self._enrolments[site] = left - (left >= 1.0), now
        if left < 1.0:
            raise Refused("busy", f"site {site}: joins again and again; wait, and join less often")

    def can_spend(self, site: str, what: str) -> bool:
        """`spend` would not refuse it."""
        return self._spent[site, what] < EVENTS[what] * self._ranks

    def spend(self, site: str, what: str) -> None:
        """A site adds to what is kept for ever; `what` is a key of `EVENTS`."""
        if not self.can_spend(site, what):
            limit = EVENTS[what] * self._ranks
            raise Refused(
                "quota",
                f"site {site}: has had its {limit} {what} since the last plan; wait for the next",
            )
        self._spent[site, what] += 1

    def key(self, site: str, key: str, others: int, size: int) -> None:
        """A site sets a key beside `others` of its own; all their values together have `size`
        bytes."""
        keys, bytes_ = KEYS * self._ranks, KEY_BYTES * self._ranks
        if others >= keys or size > bytes_:
            raise Refused(
                "quota",
                f"key {key[:80]}: site {site} may have {keys} keys with {bytes_} bytes, and has "
                f"{others} others; delete some first",
            )
