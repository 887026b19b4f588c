"""How long payloads have travelled to and from each site, and how long one may travel.

A piece that does not move for `network.link_timeout` ends its transfer. A site that lets every
piece wait a little less would still hold up everybody for hours. So a transfer as a whole has a
limit: `FACTOR` times what such a transfer usually takes on that link, and the time-out at least.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median

from dilocox.transport.link.transfer import STEP_BYTES, Transfer

FACTOR = 10.0
"""A transfer may take so many times its usual time: links are shared, and rates change."""
REMEMBERED = 16
"""Transfers of one size that the usual time is the median of."""

_Link = tuple[str, bool, int]
"""(site, sent, size as a number of bits): sizes within a factor of two count as one."""


class LinkTimes:
    """Times of the transfers of one rank. Thread-safe."""

    def __init__(self, silence: float) -> None:
        """`silence`: seconds for which one piece may not move."""
        self.silence = silence
        self._known: dict[_Link, deque[float]] = {}
        self._lock = threading.Lock()

    def note(self, transfer: Transfer) -> None:
        """A transfer has ended well."""
        key = (transfer.site, transfer.sends, transfer.size.bit_length())
        with self._lock:
            times = self._known.setdefault(key, deque(maxlen=REMEMBERED))
            times.append(transfer.ended - transfer.posted)

    def usual(self, transfer: Transfer) -> float | None:
        """Seconds that such a transfer takes on its link: as one of its size did, else as a larger
        one, else in proportion to a smaller one; None where none has ended yet."""
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
        """Seconds that a transfer may take. Where nothing is known yet, as long as every piece by
        itself may be silent.

        `share`: of the time-out, where others wait for what comes of this transfer: who waits for
        it directly has to say so before they do.
        """
        usual = self.usual(transfer)
        if usual is None:
            return self.silence * (1 + -(-transfer.size // STEP_BYTES))
        return max(share * self.silence, FACTOR * usual)

    def overdue(self, transfer: Transfer, seconds: float, share: float = 1.0) -> str | None:
        """One line for a transfer that has not ended after so many `seconds`; None if it may."""
        limit = self.limit(transfer, share)
        if seconds <= limit:
            return None
        usual = self.usual(transfer)
        known = "" if usual is None else f", usually within {usual:.3g} s"
        return (
            f"link to {transfer.site} is too slow: {transfer.size} bytes "
            f"{'to' if transfer.sends else 'from'} it are not through after {limit:.3g} s{known}"
        )
