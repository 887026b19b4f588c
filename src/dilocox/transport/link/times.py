"""Durations of transfers to and from each site, and the time limit of a transfer.

A transfer fails when it does not move on for `network.link_timeout`. But a site that delays every
step by a little less could still hold up all sites for hours. So a whole transfer has a limit too:
`FACTOR` times the usual duration of such a transfer on that link, but at least the time-out.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median

from dilocox.transport.link.transfer import STEP_BYTES, Transfer

FACTOR = 10.0
"""Multiple of the usual duration that a transfer may take: links are shared, and rates change."""
REMEMBERED = 16
"""Number of latest transfers of one size whose median duration counts as usual."""

_Link = tuple[str, bool, int]
"""(site, sent, bit length of the size in bytes): sizes of one bit length count as one size."""


class LinkTimes:
    """Durations of one rank's transfers, by site, direction and size. Thread-safe."""

    def __init__(self, silence: float) -> None:
        """`silence`: seconds without movement after which a transfer fails."""
        self.silence = silence
        self._known: dict[_Link, deque[float]] = {}
        self._lock = threading.Lock()

    def note(self, transfer: Transfer) -> None:
        """Add the duration of a transfer that has ended without an error."""
        key = (transfer.site, transfer.sends, transfer.size.bit_length())
        with self._lock:
            times = self._known.setdefault(key, deque(maxlen=REMEMBERED))
            times.append(transfer.ended - transfer.posted)

    def usual(self, transfer: Transfer) -> float | None:
        """Return the usual seconds of such a transfer on its link; None if none has ended yet.

        The value is the median of transfers of its size, else of the next larger known size, else
        of the largest known size, scaled up in proportion to the size.
        """
        bits = transfer.size.bit_length()
        with self._lock:
            known = {
                size: median(times)
                for (site, sends, size), times in self._known.items()
                if (site, sends) == (transfer.site, transfer.sends)
            }
        larger = [size for size in known if size >= bits]
        if larger:
            return known[min(larger)]
        if known:
            return float(known[max(known)] * 2 ** (bits - max(known)))
        return None

    def limit(self, transfer: Transfer, share: float = 1.0) -> float:
        """Return the seconds that a transfer may take.

        The limit is `FACTOR` times the usual duration, but at least `share` of `silence`. While no
        duration is known, the limit is `silence` seconds for each `STEP_BYTES` begun, plus
        `silence`, whatever `share` is.

        `share`: below 1 if other sites wait for the result of this transfer. The rank that waits
        directly must report the slow link before those sites report this rank.
        """
        usual = self.usual(transfer)
        if usual is None:
            return self.silence * (1 + -(-transfer.size // STEP_BYTES))
        return max(share * self.silence, FACTOR * usual)

    def overdue(self, transfer: Transfer, seconds: float, share: float = 1.0) -> str | None:
        """Return one line about a transfer that is over its limit after `seconds`; None if not."""
        limit = self.limit(transfer, share)
        if seconds <= limit:
            return None
        usual = self.usual(transfer)
        known = "" if usual is None else f", usually within {usual:.3g} s"
        return (
            f"link to {transfer.site} is too slow: {transfer.size} bytes "
            f"{'to' if transfer.sends else 'from'} it are not through after {limit:.3g} s{known}"
        )
