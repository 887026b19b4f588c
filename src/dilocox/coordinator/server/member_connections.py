"""Connections of callers that have shown a certificate: each site may have so many and no more.

A member pays for its requests (`budgets`), but an idle connection asks for nothing, and each takes
a file descriptor that all others need.
"""

from __future__ import annotations

import asyncio
from typing import Any

FEW, OF_A_RANK = 64, 16
"""Connections that a site may have, and more for each of its ranks: far beyond what ranks open."""


class Members:
    """Open connections by site, the oldest first."""

    def __init__(self, ranks: int) -> None:
        """`ranks` of every site."""
        self._most = FEW + OF_A_RANK * ranks
        self._open: dict[str, list[asyncio.Transport]] = {}

    def add(self, certificate: dict[str, Any], transport: asyncio.Transport) -> None:
        """A caller with this certificate (as `ssl` gives it) is there. If its site has too many
        connections, the oldest of that site is closed."""
        names = {key: value for part in certificate.get("subject", ()) for key, value in part}
        site = str(names.get("commonName", ""))
        there = [each for each in self._open.get(site, ()) if not each.is_closing()]
        self._open[site] = [*there, transport]
        if len(there) >= self._most:
            self._open[site].pop(0).abort()
