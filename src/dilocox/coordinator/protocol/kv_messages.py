"""Requests and responses of the coordinator's key-value store."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.message_types import Done
from dilocox.coordinator.protocol.round_plan import Message

MAX_VALUE = 64 * 1024
"""Largest value in the key-value store, in bytes."""
MAX_POLL = 20.0
"""Longest time in seconds that the server holds one request before it replies."""

Wait = Annotated[float, Field(ge=0.0, le=MAX_POLL)]
StoreKey = Annotated[str, Field(pattern=r"^(epoch/\d{1,15}|site/[a-z0-9-]{1,31}|run)/.{1,400}$")]
StoreValue = Annotated[str, Field(max_length=(MAX_VALUE + 2) // 3 * 4)]


class StoreSetRequest(Message, Call[Done]):
    """`kv/set`: sets one key.

    A key begins with `epoch/ID/`, `site/NAME/` or `run/`. Keys under `epoch/ID/` are deleted with
    their epoch and lost when the coordinator restarts. Keys under `site/NAME/` are written by that
    site only, and deleted when the site leaves. Only site NAME sets a key that ends with `/NAME`.
    """

    path: ClassVar[str] = "kv/set"
    key: StoreKey
    value: StoreValue
    """Base64 text of at most 64 KiB of bytes."""


class StoreGetReply(Message):
    """Values by key. `missing` names the keys that did not exist when the wait ended."""

    values: dict[str, str]
    missing: list[str]


class StoreGetRequest(Message, Call[StoreGetReply]):
    """`kv/get`: reads keys, and waits up to `wait` seconds until all of them exist."""

    path: ClassVar[str] = "kv/get"
    keys: Annotated[list[StoreKey], Field(min_length=1, max_length=1024)]
    wait: Wait = MAX_POLL


class StoreAddReply(Message):
    """The number after the addition."""

    value: int


class StoreAddRequest(Message, Call[StoreAddReply]):
    """`kv/add`: adds `amount` to the decimal number of a key; an absent key counts as 0.

    A retry with the same `nonce` adds nothing.
    """

    path: ClassVar[str] = "kv/add"
    key: StoreKey
    amount: Annotated[int, Field(ge=-(2**53), le=2**53)]
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]


class StoreCheckReply(Message):
    """`present` is true if all keys exist."""

    present: bool


class StoreCheckRequest(Message, Call[StoreCheckReply]):
    """`kv/check`: asks whether all keys exist."""

    path: ClassVar[str] = "kv/check"
    keys: Annotated[list[StoreKey], Field(max_length=1024)]


class StoreDeleteReply(Message):
    """`deleted` is true if the key existed."""

    deleted: bool


class StoreDeleteRequest(Message, Call[StoreDeleteReply]):
    """`kv/delete`: deletes one key."""

    path: ClassVar[str] = "kv/delete"
    key: StoreKey
