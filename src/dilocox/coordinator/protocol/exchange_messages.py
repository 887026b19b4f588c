"""Requests and responses of an exchange: its group, and the votes on its contributions.

`messages` describes the protocol and re-exports these classes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.calls import Call
from dilocox.coordinator.protocol.kv_messages import MAX_POLL, Wait
from dilocox.coordinator.protocol.message_types import Digest, KeyText, RankId, SignedText, Sites
from dilocox.coordinator.protocol.round_plan import Count, Message
from dilocox.coordinator.protocol.verdicts import Fetch, RankOpinion, Shares, VotePhase


class ExchangeMember(Message):
    """A site of an exchange. A "member" contributes and votes; an "entering" site only receives."""

    site: SiteName
    incarnation: Count
    role: Literal["member", "entering"]


class BeginReply(Message):
    """The group of one attempt of an exchange; all ranks of the key get the same group."""

    epoch: Count
    attempt: Count
    """Counts from 1. A new attempt has a new group or a new set of votes."""
    members: list[ExchangeMember]
    """In run file order."""
    decided: bool
    """True if the contribution set is final already: ask for the set with a vote."""
    waiting_for: list[str] = Field(default_factory=list)
    """Ranks that have not begun or committed. Unless it is empty, send no payload and ask again."""


class BeginRequest(Message, Call[BeginReply]):
    """`exchange/begin`: asks for the group of ranks that carries this exchange.

    The reply waits until all voting ranks have begun, and in a recorded run have committed. No rank
    sends a payload before. So no rank of a recorded run sees a payload before it has committed.
    """

    path: ClassVar[str] = "exchange/begin"
    key: KeyText
    rank: RankId
    commitment: SignedText | None = None
    """Signed statement of the digest that this rank will contribute, if the run is recorded."""
    wait: Wait = 0.0


class VoteReply(Message):
    """The next step of an exchange, from the votes so far.

    commit   final: apply the average over `set` (gather) or the computed average (reduce).
    average  reduce only: compute the average over `set`, then vote "done".
    fetch    gather only: do the transfers of `fetches` in their order, then vote "fetched".
    repeat   this attempt has ended: begin again with the new `attempt` and `epoch`.
    wait     no decision yet, so ask again; `waiting_for` names the ranks without a vote.
    """

    decision: Literal["commit", "average", "fetch", "repeat", "wait"]
    set: list[SiteName]
    """Contribution set in run file order; may be empty."""
    attempt: Count
    epoch: Count
    waiting_for: list[str]
    shares: dict[SiteName, Shares] = Field(default_factory=dict)
    """Shares of each site's payload that count at the asking rank. Empty: all count in full."""
    fetches: list[Fetch] = Field(default_factory=list)
    """With "fetch": the transfers of the asking rank's shard."""
    late: dict[SiteName, float] = Field(default_factory=dict)
    """With "commit": seconds by which each site came later than the first, where known. For metrics
    only; no decision depends on it."""


class VoteRequest(Message, Call[VoteReply]):
    """`exchange/vote`: reports which payloads this rank holds, and waits for the decision.

    Phase "held": all transfers have ended. Phase "fetched": the fetches of the reply "fetch" have
    ended, too. Phase "done": the average of a "reduce" exchange is computed.
    `failed` names sites whose link broke: the attempt is then repeated at all ranks.
    """

    path: ClassVar[str] = "exchange/vote"
    key: KeyText
    rank: RankId
    attempt: Count
    phase: VotePhase = "held"
    held: Sites = Field(default_factory=list)
    """Sites whose whole contribution this rank holds, its own site included."""
    contributes: bool = True
    """False: do not count this rank's own contribution."""
    digests: Annotated[dict[SiteName, Digest], Field(max_length=4096, default_factory=dict)]
    """SHA-256 of each held payload by site; the digest of the rank's own payload is logged."""
    statement: SignedText | None = None
    """Signed statement of the rank's own payload, if the run is recorded."""
    opinions: Annotated[dict[SiteName, RankOpinion], Field(max_length=4096, default_factory=dict)]
    broken: bool = False
    """This rank cannot complete the attempt; `failed` names sites with broken links, if known."""
    failed: Sites = Field(default_factory=list)
    observer: bool = False
    """The rank's site is entering: the rank waits for the decision without a vote."""
    wait: Wait = MAX_POLL
