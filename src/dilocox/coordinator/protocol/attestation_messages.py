"""Request that files evidence of a machine, and the reply. `messages` describes the protocol."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.round_plan import Message


class AttestReply(Message):
    """The facts that evidence of the site's machines has to name now."""

    run: str
    """Id of the run in its record."""
    manifest: str
    """SHA-256 of the log's first entry, hex."""
    site: str
    """Site whose token was given."""
    incarnation: int
    """Number of the site's latest start; 0: it has not joined."""
    evm: str | None
    """The site's account in `settlement.accounts`. None: it has none."""
    policy: str | None
    """SHA-256 of the policy for machines (`record.tee`). None: the run has none."""
    size: int
    """Number of statements of the log's newest signed checkpoint."""
    root: str
    """Root of this checkpoint, hex."""
    round: int
    """The newest planned round."""
    over: bool
    """True if the run has ended."""


class TokenAttestRequest(Message, Call[AttestReply]):
    """`attest_by_token`: files a statement of evidence. A site's token proves who asks."""

    path: ClassVar[str] = "attest_by_token"
    token: Annotated[str, Field(max_length=200)]
    statement: Annotated[str, Field(max_length=4096)] | None = None
    """The statement for the log, signed with the site's key. None: file nothing, and only ask what
    evidence has to name."""
