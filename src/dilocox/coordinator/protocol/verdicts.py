"""What is said of contributions: a rank's opinions, and the verdicts that come of them.

All numbers are whole, so that nothing depends on how a machine rounds. Part of the messages of
`messages`. What the codes mean: docs/verification.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.round_plan import Count, Message

Code = Literal[
    "admitted",
    "withdrawn",
    "not-held",
    "malformed",
    "not-finite",
    "uncommitted",
    "recommitted",
    "equivocation",
    "zero",
    "duplicate",
    "stale",
    "loss",
]
Flag = Literal["copied", "large", "small", "against", "recommitted"]
VotePhase = Literal["held", "fetched", "done"]
"""Of votes, see `messages.VoteRequest`."""
WHOLE = 65536
"""A share of one; shares are in this unit."""
MILLI = 1000
MICRO = 1_000_000
CAP = 2**53
"""Numbers of opinions lie between this and its opposite."""
Signed = Annotated[int, Field(ge=-CAP, le=CAP)]
Share = Annotated[int, Field(ge=0, le=WHOLE)]
Shares = Annotated[list[Share], Field(max_length=65536)]


class RankOpinion(Message):
    """What one rank found in one site's contribution to one exchange."""

    code: Literal["admitted", "malformed", "not-finite", "zero"] = "admitted"
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the payload that came."""
    norm: Count | None = None
    """Norm over the sites' median norm, in thousandths."""
    cosine: Signed | None = None
    """Of the angle to the mean of the others, in thousandths."""
    gain: Signed | None = None
    """How much lower the held-out loss is with this contribution alone, in millionths."""
    loss: Count | None = None
    """Held-out loss without it, in millionths."""
    shares: Shares = Field(default_factory=list)
    """What is to count of it: one number per tensor (`clip`), one for all (`rfa`), else none."""


class Fetch(Message):
    """A rank that does not hold a contribution fetches it from one that does."""

    site: SiteName
    """Who fetches, at its rank of `shard`."""
    shard: Count
    sender: SiteName
    """Whose contribution it is."""
    holder: SiteName
    """Who sends it on."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the payload."""


class Verdict(Message):
    """What was decided about one site's contribution to one exchange, once and for all."""

    code: Code = "admitted"
    flags: list[Flag] = Field(default_factory=list)
    """What people should look at; they decide nothing."""
    norm: Count | None = None
    cosine: Signed | None = None
    gain: Signed | None = None
