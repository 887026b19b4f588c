"""Opinions of ranks on contributions, and the verdicts that the coordinator makes from them.

All numbers are integers, so that no verdict depends on how a machine rounds. docs/verification.md
explains the codes; `messages` describes the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""Phases of a vote, explained in `messages.VoteRequest`."""
WHOLE = 65536
"""The share that counts a payload in full; shares are integers from 0 to this number."""
MILLI = 1000
MICRO = 1_000_000
CAP = 2**53
"""Bound of the numbers in opinions: they lie between -CAP and CAP."""
Signed = Annotated[int, Field(ge=-CAP, le=CAP)]
Share = Annotated[int, Field(ge=0, le=WHOLE)]
Shares = Annotated[list[Share], Field(max_length=65536)]


class RankOpinion(Message):
    """One rank's findings on one site's contribution to one exchange."""

    code: Literal["admitted", "malformed", "not-finite", "zero"] = "admitted"
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the received payload."""
    norm: Count | None = None
    """Norm of the contribution divided by the median norm of the sites, in thousandths."""
    cosine: Signed | None = None
    """Cosine between the contribution and the mean of the others, in thousandths."""
    gain: Signed | None = None
    """How much this contribution alone lowers the held-out loss, in millionths."""
    loss: Count | None = None
    """Held-out loss without the contribution, in millionths."""
    shares: Shares = Field(default_factory=list)
    """Shares of the contribution that should count: one per tensor (`clip`), one for all tensors
    (`rfa`), otherwise empty."""


@dataclass(frozen=True)
class RankVote:
    """A rank's vote on one attempt of an exchange; `messages.VoteRequest` explains the fields."""

    phase: VotePhase = "held"
    held: Sequence[str] = ()
    contributes: bool = True
    digests: Mapping[str, str] = field(default_factory=dict)
    statement: str | None = None
    opinions: Mapping[str, RankOpinion] = field(default_factory=dict)


class Fetch(Message):
    """Order to a rank without a contribution to fetch it from a rank that holds it."""

    site: SiteName
    """The site whose rank of `shard` fetches."""
    shard: Count
    sender: SiteName
    """The site that made the contribution."""
    holder: SiteName
    """The site that sends its copy of the contribution."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the payload."""


class Verdict(Message):
    """Final decision about one site's contribution to one exchange."""

    code: Code = "admitted"
    flags: list[Flag] = Field(default_factory=list)
    """Peculiarities for people to look at; no decision depends on them."""
    norm: Count | None = None
    cosine: Signed | None = None
    gain: Signed | None = None
