"""Requests and responses of the coordinator, version 1: JSON over mutually authenticated TLS.

A request is a POST of one model to `/v1/<name>`, or a GET (plan, status, checkpoints, ledger). A
response is one model, or a `Refusal` with status 400 or above. All bounds of fields are checked.
Time is (round, slot). A *tick* is the number of slots that have ended since the start of the run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.exchange_key import KEY_PATTERN
from dilocox.coordinator.protocol.exchange_key import ExchangeKey as ExchangeKey
from dilocox.coordinator.protocol.kv_messages import MAX_POLL as MAX_POLL
from dilocox.coordinator.protocol.kv_messages import MAX_VALUE as MAX_VALUE
from dilocox.coordinator.protocol.kv_messages import StoreAddReply as StoreAddReply
from dilocox.coordinator.protocol.kv_messages import StoreAddRequest as StoreAddRequest
from dilocox.coordinator.protocol.kv_messages import StoreCheckReply as StoreCheckReply
from dilocox.coordinator.protocol.kv_messages import StoreCheckRequest as StoreCheckRequest
from dilocox.coordinator.protocol.kv_messages import StoreDeleteReply as StoreDeleteReply
from dilocox.coordinator.protocol.kv_messages import StoreDeleteRequest as StoreDeleteRequest
from dilocox.coordinator.protocol.kv_messages import StoreGetReply as StoreGetReply
from dilocox.coordinator.protocol.kv_messages import StoreGetRequest as StoreGetRequest
from dilocox.coordinator.protocol.kv_messages import StoreSetRequest as StoreSetRequest
from dilocox.coordinator.protocol.kv_messages import Wait as Wait
from dilocox.coordinator.protocol.round_plan import Count, Line, Message
from dilocox.coordinator.protocol.round_plan import LinkEstimate as LinkEstimate
from dilocox.coordinator.protocol.round_plan import Measured as Measured
from dilocox.coordinator.protocol.round_plan import MemberPlan as MemberPlan
from dilocox.coordinator.protocol.round_plan import RoundPlan as RoundPlan
from dilocox.coordinator.protocol.verdicts import Fetch, RankOpinion, Shares, VotePhase

MAX_BODY = 1 << 20
"""Largest request that the server reads, in bytes."""

Small = Annotated[int, Field(ge=0, le=65535)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Sites = Annotated[list[SiteName], Field(max_length=4096)]
KeyText = Annotated[str, Field(pattern=KEY_PATTERN)]
SignedText = Annotated[str, Field(max_length=8192)]


class RankId(Message):
    """One process of one site."""

    site: SiteName
    stage: Small
    shard: Small

    def __str__(self) -> str:
        return f"{self.site} stage {self.stage} shard {self.shard}"


class Refusal(Message):
    """Why a call was refused: one line with the subject, the reason and the remedy."""

    error: str
    kind: Literal[
        "malformed", "refused", "join", "taken", "gone", "conflict", "over", "ended",
        "stopped", "busy", "quota",
    ]  # fmt: skip


class Done(Message):
    """Confirms that the request is recorded; carries no data."""


class Versions(Message):
    """Versions that must be equal at all sites (python: major.minor; torch: without +local)."""

    dilocox: Annotated[str, Field(max_length=64)]
    torch: Annotated[str, Field(max_length=64)]
    python: Annotated[str, Field(max_length=64)]
    defaults: Annotated[str, Field(max_length=64)] = ""
    """Digest of the defaults of all run file keys. Copies of dilocox between two releases may
    differ in defaults, and the run digest leaves defaults out."""


class LookRequest(Message):
    """`look`: asks for the run's `Status` without a client certificate, with a site's token."""

    token: Annotated[str, Field(max_length=200)]


class EnrolRequest(Message):
    """`enrol`: asks for a client certificate. A site sends it without one, once per start."""

    site: SiteName
    token: Annotated[str, Field(max_length=200)]
    run_digest: Digest
    versions: Versions
    stages: Small
    shards: Small
    csr: Annotated[str, Field(max_length=8192)]
    """Certificate signing request for the site's key, PEM."""
    data_digest: Digest | None = None
    """Digest of the token files' manifest, if the site has token files already."""
    record_key: Digest | None = None
    """Public Ed25519 key that verifies the site's statements in the run's record, hex."""
    record_proof: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")] | None = None
    """Signature that proves that the site holds the private half of `record_key`, hex."""


class EpochMember(Message):
    """One live site of a membership epoch."""

    site: SiteName
    incarnation: Count
    role: Literal["active", "entering"]


class Epoch(Message):
    """A membership epoch: the live sites in run file order. Id 0: the run has not begun."""

    id: Count
    members: list[EpochMember]


class EnrolReply(Message):
    """Certificate and run data for a site that has enrolled."""

    incarnation: Count
    certificate: str
    """Client certificate with CN = site, signed by the run's certificate authority, PEM."""
    authority: str
    """Certificate of the run's certificate authority, PEM."""
    epoch: Epoch
    record_run: str = ""
    """Id of the run in its record; empty if the run is not recorded."""
    record_manifest: str = ""
    """First entry of the record's log. The site checks and accepts it before anything else."""


class ReadyRequest(Message):
    """`ready`: reports that this rank of an entering site holds the full state."""

    rank: RankId


class Entering(Message):
    """A site that fetches state. `donor` is None for the founder, which makes theta_0."""

    site: SiteName
    incarnation: Count
    donor: SiteName | None
    from_round: Count
    """First round in which no exchange began without the site: it receives from this round on."""
    renewals: Count = 0
    """How often the coordinator told the site to fetch missing pieces again."""


class BeatRequest(Message):
    """`beat`: heartbeat of a rank. `tick` is the slots it has finished since the run started."""

    rank: RankId
    tick: Count
    round: Count
    slot: Count
    slot_seconds: Annotated[float, Field(gt=0.0, le=1e7)] | None = None
    """Recent seconds per slot without waits for the lease. None: not known yet."""
    building: bool = False
    """True while the rank cannot take part, because it builds and fills its part of the model."""


Phase = Literal["enrolling", "starting", "running", "stopping", "finished", "stopped", "failed"]


class BeatReply(Message):
    """State of the run that every rank needs at all times."""

    phase: Phase
    reason: str
    """Why the phase is `failed` or `stopping`; empty in other phases."""
    role: Literal["enrolled", "entering", "active"]
    """Role of this rank's site."""
    donor: SiteName | None
    """The site to fetch state from while entering. None: the founder, or not entering."""
    founder: SiteName | None
    """The site that makes theta_0 or loads the checkpoint. None before the start."""
    lease: Count
    """Ranks may finish slots up to and including this tick."""
    stop_tick: Count | None
    """Slot at whose end all ranks stop and write a checkpoint. None: no stop is planned."""
    epoch: Epoch
    entering: list[Entering]
    waits_for_sites: bool = False
    """True while fewer than `outer.min_sites` sites are active: no decision is made meanwhile."""


class LeaveRequest(Message):
    """`leave`: the rank's site leaves at once. `failed` is true if an error is the reason."""

    rank: RankId
    reason: Line
    failed: bool = False


class RetireRequest(Message):
    """`retire`: asks a site to leave after its planned rounds, or at once if `now` is true."""

    site: SiteName
    reason: Line
    now: bool = False


StandingChange = Literal["ban", "unban", "forget-key"]


class StandingRequest(Message):
    """`standing`: changes who may join as `site`: no site (`ban`), a site again (`unban`), or a
    site with another key (`forget-key`). For the operator alone."""

    site: SiteName
    change: StandingChange


class RetireReply(Message):
    """One line for people: what a `RetireRequest` or `StandingRequest` means for the site."""

    text: str


class DepartRequest(Message):
    """`depart`: reports that this rank of a leaving site has finished all of its exchanges."""

    rank: RankId


class StopRequest(Message):
    """`stop`: ends the run at the end of a slot, with a checkpoint that can be resumed."""

    reason: Line


class StopReply(Message):
    """The tick at which the run will stop."""

    stop_tick: Count


class FailRequest(Message):
    """`fail`: ends the run with an error, because it cannot go on."""

    rank: RankId
    reason: Line


class FinishRequest(Message):
    """`finish`: reports that this rank is done: with the run if `complete`, else up to a stop."""

    rank: RankId
    complete: bool = True


# --- plans and rounds ------------------------------------------------------------------------


class PlanReply(Message):
    """`plan/ROUND?wait=SECONDS`: the plan of a round. None: `waiting_for` says why not yet."""

    plan: RoundPlan | None
    waiting_for: str
    leave: bool = False
    """The asking site has to leave before this round."""
    receive: bool = False
    """The asking site is entering: it only receives in this round, even if the plan names it."""


class RoundDoneRequest(Message):
    """`round_done`: reports that this rank has finished a round and trained on its token ranges."""

    rank: RankId
    round: Count
    measured: Measured | None = None
    """Measurements of the whole site; only its leading rank sends them."""


# --- exchange --------------------------------------------------------------------------------


class ExchangeMember(Message):
    """A site of an exchange. A "member" contributes and votes; an "entering" site only receives."""

    site: SiteName
    incarnation: Count
    role: Literal["member", "entering"]


class BeginRequest(Message):
    """`exchange/begin`: asks for the group of ranks that carries this exchange.

    The reply waits until all voting ranks have begun, and in a recorded run have committed. No rank
    sends a payload before. So no rank of a recorded run sees a payload before it has committed.
    """

    key: KeyText
    rank: RankId
    commitment: SignedText | None = None
    """Signed statement of the digest that this rank will contribute, if the run is recorded."""
    wait: Wait = 0.0


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


class VoteRequest(Message):
    """`exchange/vote`: reports which payloads this rank holds, and waits for the decision.

    Phase "held": all transfers have ended. Phase "fetched": the fetches of the reply "fetch" have
    ended, too. Phase "done": the average of a "reduce" exchange is computed.
    `failed` names sites whose link broke: the attempt is then repeated at all ranks.
    """

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


class CheckpointRequest(Message):
    """`checkpoint`: reports that this rank's part of a checkpoint is on disk."""

    rank: RankId
    tick: Count
    round: Count
    slot: Count
    """Number of finished slots of the round."""
    digests: Annotated[dict[Annotated[str, Field(max_length=200)], Digest], Field(max_length=1000)]
    """SHA-256 by file name."""


class SpoiledRequest(Message):
    """`spoiled`: reports that this rank's files of the checkpoint at `tick` do not match their
    recorded digests."""

    rank: RankId
    tick: Count
    reason: Line


class StateRequest(Message):
    """`state`: submits this rank's signed statement of the model state that it holds."""

    rank: RankId
    statement: SignedText


class Checkpoint(Message):
    """A checkpoint as the coordinator knows it."""

    tick: Count
    round: Count
    slot: Count
    complete: bool
    sites: list[SiteName]
    written: int
    """Number of ranks that have written their part."""
    digests: dict[str, dict[str, str]]
    """SHA-256 by rank (its text) and by file name."""


class Checkpoints(Message):
    """`checkpoints`: in order of tick, without checkpoints that a resume has superseded."""

    checkpoints: list[Checkpoint]


ReportKind = Literal[
    "round", "flush", "evaluation", "first_evaluation", "peer_evaluation", "warning"
]


class ReportRequest(Message):
    """`report`: one rank submits its site's metrics; repeats of (round, kind) are ignored."""

    rank: RankId
    round: Count
    kind: ReportKind = "round"
    metrics: Annotated[dict[str, Any], Field(max_length=1000)]


class SiteStatus(Message):
    """State of one site, for the display."""

    site: SiteName
    incarnation: Count
    role: Literal["absent", "enrolled", "entering", "active", "finished", "gone"]
    reason: str
    banned: bool = False
    """True if the operator lets no site join under this name."""
    rounds_done: Count
    metrics: dict[str, dict[str, Any]]
    """Latest report by kind; each has its `round`."""


class FeedMessage(Message):
    """One line about an event of the run, for people."""

    sequence: Count
    time: float
    """Unix seconds."""
    kind: Literal["join", "leave", "plan", "decision", "checkpoint", "phase"]
    text: str


class Status(Message):
    """Overview of the run, for the display."""

    phase: Phase
    reason: str
    run: str
    steps: Count
    """Inner steps of a site in the whole run."""
    plans: Count
    """Number of rounds planned so far."""
    lease: Count
    stop_tick: Count | None
    epoch: Epoch
    sites: list[SiteStatus]
    messages: list[FeedMessage]
    """Lines after sequence number `since` of the request, at most the latest 1,000."""
    sequence: Count
    """Rises with every change that a display shows. The next request sends it as `since`."""


class RangeEntry(Message):
    """One line of the ledger of token ranges."""

    site: SiteName
    incarnation: Count
    round: Count
    space: str
    start: Count
    count: Count
    state: Literal["issued", "committed", "returned"]


class Ledger(Message):
    """`ledger`: which site got which sequence numbers, and whether it has trained on them."""

    entries: list[RangeEntry]
    next: dict[str, Count]
    """First sequence number that was never issued, by space."""
    pool: dict[str, list[tuple[Count, Count]]]
    """Returned ranges (start, count) that wait to be issued again, by space."""
