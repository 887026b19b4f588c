"""Limit on the open connections of each site, for callers with a certificate.

Budgets (`budgets`) limit a member's requests. An idle connection makes no request, but uses one of
the coordinator's file descriptors, which all members share.
"""

from __future__ import annotations

import asyncio
from typing import Any

FEW, OF_A_RANK = 64, 16
"""A site may have FEW connections plus OF_A_RANK for each rank. Ranks open far fewer."""


class Members:
    """Open connections by site, the oldest first."""

    def __init__(self, ranks: int) -> None:
        """`ranks`: number of ranks of every site."""
        self._most = FEW + OF_A_RANK * ranks
        self._open: dict[str, list[asyncio.Transport]] = {}

    def add(self, certificate: dict[str, Any], transport: asyncio.Transport) -> None:
        """Add the connection of a caller with this certificate (as `ssl` returns it).

        If its site has too many connections, the site's oldest one is closed.
        """
        names = {key: value for part in certificate.get("subject", ()) for key, value in part}
        site = str(names.get("commonName", ""))
        there = [each for each in self._open.get(site, ()) if not each.is_closing()]
        self._open[site] = [*there, transport]
        if len(there) >= self._most:
            self._open[site].pop(0).abort()
