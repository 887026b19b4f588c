"""Connections to a coordinator that may be at one of several addresses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import urllib3


class AddressPool:
    """Connection pools of several addresses. Calls use one of them until it fails.

    The coordinator and its standby have different addresses and the same certificate. A caller
    that gets no answer retries, and the retry goes to the next address. Thread-safe.
    """

    def __init__(self, pools: Sequence[urllib3.HTTPSConnectionPool]) -> None:
        """Use `pools`, of which there is at least one, beginning with the first."""
        self._pools = list(pools)
        self._at = 0
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """All addresses, as HOST:PORT."""
        return ", ".join(f"{pool.host}:{pool.port}" for pool in self._pools)

    def urlopen(self, method: str, path: str, **arguments: Any) -> urllib3.BaseHTTPResponse:
        """Make a request, as `urllib3` does. If it fails, the next request uses the next address.

        Raises the errors of `urllib3`.
        """
        pool = self._pools[self._at]
        try:
            return pool.urlopen(method, path, **arguments)
        except (urllib3.exceptions.HTTPError, OSError):
            self._turn(pool)
            raise

    def turn(self) -> None:
        """Let the next request use the next address."""
        self._turn(self._pools[self._at])

    def close(self) -> None:
        """Close idle connections."""
        for pool in self._pools:
            pool.close()

    def _turn(self, failed: urllib3.HTTPSConnectionPool) -> None:
        """Move on, unless another thread has done so since `failed` was used."""
        with self._lock:
            if self._pools[self._at] is failed:
                self._at = (self._at + 1) % len(self._pools)
