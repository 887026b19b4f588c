"""Key-value store for the rendezvous of process groups."""

from __future__ import annotations

import base64
from collections.abc import Callable

from dilocox.outer.coordinator import messages as m
from dilocox.outer.coordinator.refusals import Caller, Refused
from dilocox.outer.coordinator.state import CoordinatorState

MAX_KEYS = 65536


class Store:
    """Keys `epoch/ID/...` in memory, dropped when nobody needs the epoch any more; keys
    `site/NAME/...` and `run/...` in the state, through `record` (key, value or none)."""

    def __init__(self, state: CoordinatorState, record: Callable[[str, str | None], None]) -> None:
        self._state, self._record = state, record
        self._values: dict[str, str] = {}
        self._sums: dict[tuple[str, str], int] = {}
        """Results of additions by (key, nonce), so that a retry adds nothing."""

    def set(self, request: m.StoreSetRequest, caller: Caller) -> m.Done:
        """Set a key."""
        self._check(request.key, caller, write=True)
        self._put(request.key, request.value)
        return m.Done()

    def get(self, request: m.StoreGetRequest, caller: Caller) -> m.StoreGetReply:
        """Values of the keys that are there."""
        values = {}
        for key in request.keys:
            self._check(key, caller, write=False)
            value = self._find(key)
            if value is not None:
                values[key] = value
        missing = [key for key in request.keys if key not in values]
        return m.StoreGetReply(values=values, missing=missing)

    def add(self, request: m.StoreAddRequest, caller: Caller) -> m.StoreAddReply:
        """Add to a decimal number, once per nonce."""
        self._check(request.key, caller, write=True)
        nonce = (request.key, request.nonce)
        if nonce not in self._sums:
            present = self._find(request.key)
            try:
                total = (int(base64.b64decode(present)) if present else 0) + request.amount
            except ValueError:
                raise Refused("conflict", f"key {request.key}: not a number") from None
            self._put(request.key, base64.b64encode(str(total).encode()).decode())
            self._sums[nonce] = total
        return m.StoreAddReply(value=self._sums[nonce])

    def delete(self, request: m.StoreDeleteRequest, caller: Caller) -> m.StoreDeleteReply:
        """Remove a key."""
        self._check(request.key, caller, write=True)
        deleted = self._find(request.key) is not None
        if self._values.pop(request.key, None) is None and deleted:
            self._record(request.key, None)
        return m.StoreDeleteReply(deleted=deleted)

    def check(self, request: m.StoreCheckRequest) -> m.StoreCheckReply:
        """Are all keys there?"""
        present = all(self._find(key) is not None for key in request.keys)
        return m.StoreCheckReply(present=present)

    def forget_old_epochs(self) -> None:
        """Drop the keys of epochs that no exchange needs any more."""
        self._values = {key: value for key, value in self._values.items() if self._current(key)}
        self._sums = {
            nonce: total for nonce, total in self._sums.items() if self._current(nonce[0])
        }

    def _find(self, key: str) -> str | None:
        return self._values.get(key, self._state.store.get(key))

    def _put(self, key: str, value: str) -> None:
        if key.startswith("epoch/"):
            self._values[key] = value
        elif self._state.store.get(key) != value:
            self._record(key, value)

    def _current(self, key: str) -> bool:
        if not key.startswith("epoch/"):
            return True
        epoch = int(key.split("/", 2)[1])
        state = self._state
        return epoch == state.epoch or any(
            state.exchanges[exchange].epoch == epoch for exchange in state.undecided
        )

    def _check(self, key: str, caller: Caller, *, write: bool) -> None:
        if not self._current(key):
            raise Refused("over", f"key {key}: its epoch is over; begin the exchange again")
        if not write:
            return
        if key.startswith("site/") and key.split("/", 2)[1] != caller.site:
            raise Refused("refused", f"key {key}: only that site sets it")
        if len(self._values) + len(self._state.store) >= MAX_KEYS:
            raise Refused("conflict", f"key {key}: the store is full ({MAX_KEYS} keys)")
