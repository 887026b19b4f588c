"""Limits on the requests of each site, so that one site cannot overload the coordinator.

Every site has budgets in proportion to its ranks: requests and bytes per second, events between two
plans, and keys of the key-value store. Budgets are far larger than ranks need. A request beyond a
budget is refused; heartbeats are not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.refusals import Caller, Refused

REQUESTS, REQUEST_BURST = 100.0, 2000.0
"""Requests per second and largest burst, for each rank of a site."""
BYTES, BYTE_BURST = float(1 << 20), float(32 << 20)
"""Bytes of request bodies per second and largest burst, for each rank of a site."""
ENROLMENTS, ENROLMENT_BURST = 0.5, 100.0
"""Enrolments per second and largest burst of a site; each one is in event log and record."""
KEYS, KEY_BYTES = 256, 1 << 20
"""Keys in the key-value store and bytes of their values, for each rank of a site."""
EVENTS = {
    "warnings": 32,
    "signed states": 32,
    "signed pieces": 64,
    "checkpoints": 8,
    "lasting keys": 256,
    "digests of pieces": 256,
    "renewals": 2,
    "verdicts": 32,
    "attestations": 32,
}
"""Events by kind that each rank of a site may cause between two plans."""
_NEW_ROUND = (e.Planned, e.Started, e.Entered, e.Overtaken, e.Resumed)
"""Events that reset the budgets of `EVENTS`."""


class Budgets:
    """Budgets that sites have used. Raises `Refused` of kind `busy` or `quota` beyond a budget."""

    def __init__(self, ranks: int, now: Callable[[], float] = time.monotonic) -> None:
        """`ranks`: number of ranks of every site. `now`: monotonic clock, in seconds."""
        self._ranks, self._now = ranks, now
        self._spent: Counter[tuple[str, str]] = Counter()
        self._left: dict[str, tuple[float, float, float]] = {}
        """By site: requests left, bytes left, and the moment of this count."""
        self._enrolments: dict[str, tuple[float, float]] = {}
        """By site: enrolments left, and the moment of this count."""

    def happened(self, event: e.Event) -> None:
        """Note an event that was logged."""
        if isinstance(event, _NEW_ROUND):
            self._spent.clear()

    def charge(self, caller: Caller, size: int = 0) -> None:
        """Charge a request with a body of `size` bytes. Raises `Refused` (`busy`)."""
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
        """Charge an enrolment of a site. Raises `Refused` (`busy`)."""
        now = self._now()
        left, then = self._enrolments.get(site, (ENROLMENT_BURST, now))
        left = min(ENROLMENT_BURST, left + max(0.0, now - then) * ENROLMENTS)
        self._enrolments[site] = left - (left >= 1.0), now
        if left < 1.0:
            raise Refused("busy", f"site {site}: joins again and again; wait, and join less often")

    def can_spend(self, site: str, what: str) -> bool:
        """Return whether `spend` would accept."""
        return self._spent[site, what] < EVENTS[what] * self._ranks

    def spend(self, site: str, what: str) -> None:
        """Charge an event that is stored permanently; `what` is a key of `EVENTS`.

        Raises `Refused` (`quota`).
        """
        if not self.can_spend(site, what):
            limit = EVENTS[what] * self._ranks
            raise Refused(
                "quota",
                f"site {site}: has used up its {limit} {what} since the last plan; wait for the "
                "next plan",
            )
        self._spent[site, what] += 1

    def key(self, site: str, key: str, others: int, size: int) -> None:
        """Check that a site may set a key. Raises `Refused` (`quota`).

        `others` is the number of its other keys, `size` the bytes of all its values with this one.
        """
        keys, bytes_ = KEYS * self._ranks, KEY_BYTES * self._ranks
        if others >= keys or size > bytes_:
            raise Refused(
                "quota",
                f"key {key[:80]}: site {site} may have {keys} keys with {bytes_} bytes, and has "
                f"{others} others; delete some first",
            )
