"""Key-value store through which ranks find each other to form process groups (rendezvous)."""

from __future__ import annotations

import base64
from collections.abc import Callable

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.budgets import Budgets
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.state import CoordinatorState

MAX_KEYS = 65536
MAX_SUMS = 256
"""Number of results of additions kept per site; a retry asks only for the latest one."""


class Store:
    """Key-value store of one run.

    Keys `epoch/ID/...` are in memory, and are dropped when no exchange needs the epoch any more.
    Keys `site/NAME/...` and `run/...` are in the state; `record` logs (key, value or None, site).
    A key that ends with the name of a site belongs to this site. Any other key belongs to the site
    that set it first. Only the owner changes a key."""

    def __init__(
        self,
        state: CoordinatorState,
        record: Callable[[str, str | None, str], None],
        budgets: Budgets,
    ) -> None:
        self._state, self._record, self._budgets = state, record, budgets
        self._values: dict[str, str] = {}
        self._owned: dict[str, dict[str, int]] = {}
        """By site: sizes of the values that it set in `_values`, by key."""
        self._sums: dict[str, dict[tuple[str, str], int]] = {}
        """By site: results of additions by (key, nonce), so that a retry adds nothing."""

    def set(self, request: m.StoreSetRequest, caller: Caller) -> m.Done:
        """Set a key. Raises `Refused` if the caller may not set it, or the store is full."""
        self._check(request.key, caller, write=True)
        self._put(request.key, request.value, caller)
        return m.Done()

    def get(self, request: m.StoreGetRequest, caller: Caller) -> m.StoreGetReply:
        """Return the values of the keys that exist, and the names of those that do not."""
        values = {}
        for key in request.keys:
            self._check(key, caller, write=False)
            value = self._find(key)
            if value is not None:
                values[key] = value
        missing = [key for key in request.keys if key not in values]
        return m.StoreGetReply(values=values, missing=missing)

    def add(self, request: m.StoreAddRequest, caller: Caller) -> m.StoreAddReply:
        """Add to the decimal number of a key, once per nonce. Raises `Refused` as `set` does."""
        self._check(request.key, caller, write=True)
        nonce, sums = (request.key, request.nonce), self._sums.setdefault(caller.site, {})
        if nonce not in sums:
            present = self._find(request.key)
            try:
                total = (int(base64.b64decode(present)) if present else 0) + request.amount
            except ValueError:
                raise Refused("conflict", f"key {request.key}: not a number") from None
            self._put(request.key, base64.b64encode(str(total).encode()).decode(), caller)
            sums[nonce] = total
            for old in list(sums)[:-MAX_SUMS]:
                del sums[old]
        return m.StoreAddReply(value=sums[nonce])

    def delete(self, request: m.StoreDeleteRequest, caller: Caller) -> m.StoreDeleteReply:
        """Delete a key. Raises `Refused` if the caller may not change it."""
        self._check(request.key, caller, write=True)
        deleted = self._find(request.key) is not None
        if self._values.pop(request.key, None) is None and deleted:
            self._budgets.spend(caller.site, "lasting keys")
            self._record(request.key, None, caller.site)
        self._owned.get(caller.site, {}).pop(request.key, None)
        self._forget_sums()
        return m.StoreDeleteReply(deleted=deleted)

    def check(self, request: m.StoreCheckRequest) -> m.StoreCheckReply:
        """Return whether all keys exist."""
        present = all(self._find(key) is not None for key in request.keys)
        return m.StoreCheckReply(present=present)

    def forget_old_epochs(self) -> None:
        """Drop the keys of epochs that no exchange needs any more."""
        self._values = {key: value for key, value in self._values.items() if self._current(key)}
        self._owned = {
            site: {key: size for key, size in own.items() if key in self._values}
            for site, own in self._owned.items()
        }
        self._forget_sums()

    def _forget_sums(self) -> None:
        """Drop the results of additions whose key no longer exists."""
        self._sums = {
            site: {at: total for at, total in sums.items() if self._find(at[0]) is not None}
            for site, sums in self._sums.items()
        }

    def _find(self, key: str) -> str | None:
        return self._values.get(key, self._state.store.get(key))

    def _put(self, key: str, value: str, caller: Caller) -> None:
        if self._find(key) == value:
            return
        own = self._own(caller.site)
        own.pop(key, None)
        if not caller.operator:
            self._budgets.key(caller.site, key, len(own), sum(own.values()) + len(value))
        if self._find(key) is None and len(self._values) + len(self._state.store) >= MAX_KEYS:
            raise Refused("conflict", f"key {key}: the store is full ({MAX_KEYS} keys)")
        if key.startswith("epoch/"):
            self._values[key] = value
            self._owned.setdefault(caller.site, {})[key] = len(value)
            return
        if not caller.operator:
            self._budgets.spend(caller.site, "lasting keys")
        self._record(key, value, caller.site)

    def _own(self, site: str) -> dict[str, int]:
        """Return the sizes of a site's values, by key."""
        lasting = [key for key, owner in self._state.owners.items() if owner == site]
        return self._owned.get(site, {}) | {key: len(self._state.store[key]) for key in lasting}

    def _owner(self, key: str) -> str:
        if key in self._state.owners:
            return self._state.owners[key]
        return next((site for site, own in self._owned.items() if key in own), "")

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
        named = key.rsplit("/", 1)[-1]
        if named in self._state.sites and named != caller.site:
            raise Refused("refused", f"key {key}: only site {named}, whose name it has, sets it")
        owner = self._owner(key)
        if owner not in ("", caller.site):
            raise Refused("refused", f"key {key}: only site {owner}, which has set it, changes it")
