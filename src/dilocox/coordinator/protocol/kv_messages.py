"""Requests and responses of the coordinator's key-value store."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dilocox.coordinator.protocol.round_plan import Message

MAX_VALUE = 64 * 1024
"""Largest value of the key-value store, in bytes."""
MAX_POLL = 20.0
"""Longest time that one request waits at the server, in seconds."""

Wait = Annotated[float, Field(ge=0.0, le=MAX_POLL)]
StoreKey = Annotated[str, Field(pattern=r"^(epoch/\d{1,15}|site/[a-z0-9-]{1,31}|run)/.{1,400}$")]
StoreValue = Annotated[str, Field(max_length=(MAX_VALUE + 2) // 3 * 4)]


class StoreSetRequest(Message):
    """`kv/set`. Keys begin with `epoch/ID/` (dropped with its epoch, lost when the coordinator
    restarts), `site/NAME/` (written by that site only, dropped when it goes) or `run/`. Only the
    site of that name sets a key that ends with `/NAME`."""

    key: StoreKey
    value: StoreValue
    """Base64, at most 64 KiB decoded."""


class StoreGetRequest(Message):
    """`kv/get`: waits until all keys are there."""

    keys: Annotated[list[StoreKey], Field(min_length=1, max_length=1024)]
    wait: Wait = MAX_POLL


class StoreGetReply(Message):
    """Values by key; `missing` is not empty when the wait was over first."""

    values: dict[str, str]
    missing: list[str]


class StoreAddRequest(Message):
    """`kv/add`: adds to a decimal number, absent counts as 0. `nonce` makes a retry harmless."""

    key: StoreKey
    amount: Annotated[int, Field(ge=-(2**53), le=2**53)]
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]


class StoreAddReply(Message):
    """The sum."""

    value: int


class StoreCheckRequest(Message):
    """`kv/check`: are all keys there?"""

    keys: Annotated[list[StoreKey], Field(max_length=1024)]


class StoreCheckReply(Message):
    """True if all are."""

    present: bool


class StoreDeleteRequest(Message):
    """`kv/delete`."""

    key: StoreKey


class StoreDeleteReply(Message):
    """Whether the key was there."""

    deleted: bool
