"""Requests of a standby, which copies the coordinator's log while the run goes on, and replies.

`messages` describes the protocol. A reply of the coordinator to a site has a header that names the
position of its log (`POSITION`); the site's next request names the newest position that the site
has seen (`SEEN`). Both are `GENERATION NUMBER SEAL`. Only the run's coordinators can make a seal:
a site can pass a position on, and cannot make one up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field

from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.round_plan import Count, Message

POSITION, SEEN = "Dilocox-Position", "Dilocox-Seen"
"""Headers of replies and of requests."""
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


@dataclass(frozen=True, order=True)
class Position:
    """A position in the event log of one generation of coordinators.

    A standby that takes over begins a new generation. Later generations are greater.
    """

    generation: int = 0
    """From 1; 0: nothing was seen."""
    number: int = 0
    """Number of the last event."""
    seal: str = field(default="", compare=False)
    """Hex, see `SiteTokens.seal`."""

    @property
    def said(self) -> str:
        """The text that is sealed."""
        return f"{self.generation} {self.number}"

    @property
    def text(self) -> str:
        """The value of a header."""
        return f"{self.said} {self.seal}"

    @classmethod
    def parse(cls, text: str | None) -> Position:
        """Return the position of a header's value; nothing seen for a missing or malformed one."""
        match = re.fullmatch(r"([0-9]{1,9}) ([0-9]{1,15}) ([0-9a-f]{64})", text or "")
        return cls(int(match[1]), int(match[2]), match[3]) if match else cls()


class Copied(Message):
    """How much of the coordinator's files a standby has on its disk."""

    events: Count
    """Number of the last event."""
    event_digest: Digest
    """SHA-256 of that event, hex; empty for none."""
    record: Count
    """Bytes of the record's statements."""
    statements: Count
    """Number of these statements."""
    record_digest: Digest
    """SHA-256 of the last of these statements, hex; empty for none."""
    metrics: Count
    """Bytes of the metrics."""


class FollowReply(Message):
    """What follows after the bytes that a standby has."""

    generation: Count
    last: Count
    """Number of the log's last event."""
    events: list[tuple[Count, float, str, str]]
    """(number, Unix time, kind, data as JSON) of each event, in their order."""
    record: str
    """Whole lines of the record's statements."""
    metrics: str
    """Whole lines of the metrics."""
    run_file: str
    """The run file as the coordinator has written it."""
    over: bool
    """Whether the run has ended."""

    @property
    def content(self) -> bool:
        """Whether the reply has anything new."""
        return bool(self.events or self.record or self.metrics)


class FollowRequest(Message, Call[FollowReply]):
    """`follow`: asks for what a standby lacks, and says what is on its disk."""

    path: ClassVar[str] = "follow"
    name: Annotated[str, Field(max_length=64)]
    """Tells one process of a standby from another."""
    copied: Copied
    wait: Annotated[float, Field(ge=0.0, le=20.0)] = 0.0


class FenceRequest(Message, Call[FollowReply]):
    """`fence`: ends this coordinator, because a standby takes over. The reply has all that follows
    after the bytes that the standby has. The run itself goes on."""

    path: ClassVar[str] = "fence"
    name: Annotated[str, Field(max_length=64)]
    copied: Copied
    generation: Count
    """The generation that the standby begins."""
    late: bool = False
    """Whether the standby has taken over already, and needs nothing any more."""
