"""What auditors hand in. Part of the messages of `messages`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dilocox.coordinator.protocol.round_plan import Message

SignedVerdict = Annotated[str, Field(max_length=4096)]


class HandInRequest(Message):
    """`verdict`: an audit's verdict, for the run's record."""

    statement: SignedVerdict | None = None
    """What its auditor has signed for the log. None: only say by whom one would be handed in."""


class TokenHandInRequest(HandInRequest):
    """`verdict_by_token`: the same, for who holds a site's token; without a certificate."""

    token: Annotated[str, Field(max_length=200)]


class HandInReply(Message):
    """It is in the log."""

    run: str
    """The run's id in its record."""
    by: str
    """The site in whose name it is handed in, which the statement has to name; empty: the operator.
    """
