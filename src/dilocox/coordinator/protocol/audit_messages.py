"""Requests that submit an audit's verdict, and the reply. `messages` describes the protocol."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.round_plan import Message

SignedVerdict = Annotated[str, Field(max_length=4096)]


class HandInReply(Message):
    """Says in whose name the verdict is in the log; without a statement, in whose it would be."""

    run: str
    """Id of the run in its record."""
    by: str
    """The site in whose name the verdict is submitted; the statement has to name the same site.
    Empty: the operator."""


class HandInRequest(Message, Call[HandInReply]):
    """`verdict`: submits the verdict of an audit for the run's record."""

    path: ClassVar[str] = "verdict"
    statement: SignedVerdict | None = None
    """The statement for the log, signed by the auditor. None: submit nothing, and only ask in whose
    name a verdict would be submitted."""


class TokenHandInRequest(HandInRequest):
    """`verdict_by_token`: the same request without a client certificate; a site's token proves who
    asks."""

    path: ClassVar[str] = "verdict_by_token"
    token: Annotated[str, Field(max_length=200)]
