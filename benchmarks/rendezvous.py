"""Exchange of addresses between processes of one machine, for benchmarks and tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dilocox.errors import ExchangeError


class MemoryStore:
    """`KeyValue` on a dictionary that processes share."""

    def __init__(self, values: Any) -> None:
        """`values` is a dictionary, or the proxy of a dictionary."""
        self._values = values

    def kv_set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""
        self._values[key] = value

    def kv_check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist."""
        return all(key in self._values for key in keys)

    def kv_get(self, keys: Sequence[str], limit: float) -> dict[str, bytes]:
        """Return the values of `keys`, and wait up to `limit` seconds for them.

        Raises `ExchangeError` if a key is missing after `limit`.
        """
        end = time.monotonic() + limit
        while not self.kv_check(keys):
            if time.monotonic() > end:
                raise ExchangeError(f"{keys} not set")
            time.sleep(0.005)
        return {key: self._values[key] for key in keys}
