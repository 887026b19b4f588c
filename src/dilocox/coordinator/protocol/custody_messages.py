"""Request that submits signed custody of pieces. `messages` describes the protocol."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.message_types import Digest, RankId, SignedText
from dilocox.coordinator.protocol.round_plan import Message

MOST_ASKED = 64
"""Largest number of exchanges that one request asks about."""
_Key = Annotated[str, Field(max_length=100)]


class CustodyReply(Message):
    """Names the cuts that have a certificate, of those that the request asked about."""

    certified: dict[_Key, Digest]
    """Certified root, by text of the exchange's key."""


class CustodyRequest(Message, Call[CustodyReply]):
    """`custody`: submits a rank's signed statement that it holds its pieces, or only asks."""

    path: ClassVar[str] = "custody"
    rank: RankId
    statement: SignedText | None = None
    """None: submit nothing, and only ask."""
    asked: Annotated[list[_Key], Field(max_length=MOST_ASKED)] = []  # noqa: RUF012 - pydantic copies
    """Exchanges of the rank's shard about which the reply says whether they have a certificate."""
