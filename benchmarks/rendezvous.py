"""Exchange of addresses between processes of one machine, for benchmarks and tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dilocox.errors import ExchangeError


class MemoryStore:
    """`KeyValue` on a dictionary that processes share."""

    def __init__(self, values: Any) -> None:
        """`values`: a dictionary, or the proxy of one."""
        self._values = values

    def kv_set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""
        self._values[key] = value

    def kv_check(self, keys: Sequence[str]) -> bool:
        """True if all `keys` are there."""
        return all(key in self._values for key in keys)

    def kv_get(self, keys: Sequence[str], limit: float) -> dict[str, bytes]:
        """The values of `keys`, waiting up to `limit` seconds. Raises `ExchangeError`."""
        end = time.monotonic() + limit
        while not self.kv_check(keys):
            if time.monotonic() > end:
                raise ExchangeError(f"{keys} not set")
            time.sleep(0.005)
        return {key: self._values[key] for key in keys}
