"""Limit on the open connections of each site, whose callers have shown a certificate.

Budgets (`budgets`) bound a member's requests. An idle connection makes no request, but holds one of
the coordinator's file descriptors, which all members share.
"""

from __future__ import annotations

import asyncio
from typing import Any

FEW, OF_A_RANK = 64, 16
"""A site may have FEW connections, and OF_A_RANK more for each rank. Ranks open far fewer."""


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
