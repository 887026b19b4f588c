"""Requests and responses of the coordinator, version 1: JSON over mutually authenticated TLS.

A request is a POST of one model to `/v1/<path>`, or a GET (plan, status, checkpoints, ledger). Its
class has the path and the class of the reply (`calls.Call`). A response is one model, or a
`Refusal` with status 400 or above. All bounds of fields are checked.
Time is (round, slot). A *tick* is the number of slots that have ended since the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dilocox.config.site import SiteName
from dilocox.coordinator.protocol.calls import Call, Query
from dilocox.coordinator.protocol.exchange_key import ExchangeKey as ExchangeKey
from dilocox.coordinator.protocol.exchange_messages import BeginReply as BeginReply
from dilocox.coordinator.protocol.exchange_messages import BeginRequest as BeginRequest
from dilocox.coordinator.protocol.exchange_messages import ExchangeMember as ExchangeMember
from dilocox.coordinator.protocol.exchange_messages import VoteReply as VoteReply
from dilocox.coordinator.protocol.exchange_messages import VoteRequest as VoteRequest
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
from dilocox.coordinator.protocol.message_types import Digest as Digest
from dilocox.coordinator.protocol.message_types import Done as Done
from dilocox.coordinator.protocol.message_types import RankId as RankId
from dilocox.coordinator.protocol.message_types import ReportReply as ReportReply
from dilocox.coordinator.protocol.message_types import SignedText as SignedText
from dilocox.coordinator.protocol.message_types import Small as Small
from dilocox.coordinator.protocol.round_plan import Count, Line, Message
from dilocox.coordinator.protocol.round_plan import LinkEstimate as LinkEstimate
from dilocox.coordinator.protocol.round_plan import Measured as Measured
from dilocox.coordinator.protocol.round_plan import MemberPlan as MemberPlan
from dilocox.coordinator.protocol.round_plan import RoundPlan as RoundPlan

MAX_BODY = 1 << 20
"""Largest request that the server reads, in bytes."""


class Refusal(Message):
    """Why a call was refused: one line with the subject, the reason and the remedy."""

    error: str
    kind: Literal[
        "malformed", "refused", "join", "taken", "gone", "conflict", "over", "ended",
        "stopped", "busy", "quota", "stake",
    ]  # fmt: skip


class Versions(Message):
    """Versions that must be equal at all sites (python: major.minor; torch: without +local)."""

    dilocox: Annotated[str, Field(max_length=64)]
    torch: Annotated[str, Field(max_length=64)]
    python: Annotated[str, Field(max_length=64)]
    defaults: Annotated[str, Field(max_length=64)] = ""
    """Digest of the defaults of all run file keys. Copies of dilocox between two releases may
    differ in defaults, and the run digest leaves defaults out."""
    peft: Annotated[str, Field(max_length=64)] = ""
    """Version of the package peft; empty if the run has no adapters."""
    bitsandbytes: Annotated[str, Field(max_length=64)] = ""
    """Version of the package bitsandbytes; empty unless a frozen base is in NF4."""

    def named(self) -> dict[str, str]:
        """Return the versions by package. Packages that the run does not need are left out."""
        versions: dict[str, str] = self.model_dump()
        optional = {"peft", "bitsandbytes"}
        return {name: said for name, said in versions.items() if said or name not in optional}


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


class StakeProof(Message):
    """A signature of the site's account on the site's record key (EIP-712 `Enrol`)."""

    expiry: Annotated[int, Field(ge=0, le=2**53 - 1)]
    """Unix time until which a site may join with it, seconds."""
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{130}$")]


class Application(Message):
    """A site that wants to join, as it describes itself."""

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
    base_digest: Digest | None = None
    """Digest of the frozen base model; None if the run has no adapters."""
    code_digest: Digest | None = None
    """SHA-256 of the user's own functions (`run.code`). `run_digest` covers it; a refusal names
    it. None if the site has none."""
    record_key: Digest | None = None
    """Public Ed25519 key that verifies the site's statements in the run's record, hex."""
    record_proof: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")] | None = None
    """Signature that proves that the site holds the private half of `record_key`, hex."""
    stake: StakeProof | None = None
    """None unless `settlement.admission` asks for it."""


class EnrolRequest(Application, Call[EnrolReply]):
    """`enrol`: asks for a client certificate. A site sends it without one, once per start."""

    path: ClassVar[str] = "enrol"


class ApplyRequest(Application, Call[Done]):
    """`apply`: asks whether `enrol` would be refused, but for a stake. Nothing is changed.

    A site asks before it stakes.
    """

    path: ClassVar[str] = "apply"


class ReadyRequest(Message, Call[Done]):
    """`ready`: reports that this rank of an entering site holds the full state."""

    path: ClassVar[str] = "ready"
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


class BeatRequest(Message, Call[BeatReply]):
    """`beat`: heartbeat of a rank. `tick` is the slots it has finished since the run started."""

    path: ClassVar[str] = "beat"
    rank: RankId
    tick: Count
    round: Count
    slot: Count
    slot_seconds: Annotated[float, Field(gt=0.0, le=1e7)] | None = None
    """Recent seconds per slot without waits for the lease. None: not known yet."""
    building: bool = False
    """True while the rank cannot take part, because it builds and fills its part of the model."""


class LeaveRequest(Message, Call[Done]):
    """`leave`: the rank's site leaves at once. `failed` is true if an error is the reason."""

    path: ClassVar[str] = "leave"
    rank: RankId
    reason: Line
    failed: bool = False


StandingChange = Literal["ban", "unban", "forget-key"]


class RetireReply(Message):
    """One line for people: what a `RetireRequest` or `StandingRequest` means for the site."""

    text: str


class RetireRequest(Message, Call[RetireReply]):
    """`retire`: asks a site to leave after its planned rounds, or at once if `now` is true."""

    path: ClassVar[str] = "retire"
    site: SiteName
    reason: Line
    now: bool = False


class StandingRequest(Message, Call[RetireReply]):
    """`standing`: changes who may join as `site`: no site (`ban`), a site again (`unban`), or a
    site with another key (`forget-key`). For the operator alone."""

    path: ClassVar[str] = "standing"
    site: SiteName
    change: StandingChange


class DepartRequest(Message, Call[Done]):
    """`depart`: reports that this rank of a leaving site has finished all of its exchanges."""

    path: ClassVar[str] = "depart"
    rank: RankId


class StopReply(Message):
    """The tick at which the run will stop."""

    stop_tick: Count


class StopRequest(Message, Call[StopReply]):
    """`stop`: ends the run at the end of a slot, with a checkpoint that can be resumed."""

    path: ClassVar[str] = "stop"
    reason: Line


class FailRequest(Message, Call[Done]):
    """`fail`: ends the run with an error, because it cannot go on."""

    path: ClassVar[str] = "fail"
    rank: RankId
    reason: Line


class FinishRequest(Message, Call[Done]):
    """`finish`: reports that this rank is done: with the run if `complete`, else up to a stop."""

    path: ClassVar[str] = "finish"
    rank: RankId
    complete: bool = True


# --- plans and rounds ------------------------------------------------------------------------


class PlanReply(Message):
    """The plan of a round. None: `waiting_for` says why not yet."""

    plan: RoundPlan | None
    waiting_for: str
    leave: bool = False
    """The asking site has to leave before this round."""
    receive: bool = False
    """The asking site is entering: it only receives in this round, even if the plan names it."""


@dataclass(frozen=True)
class PlanQuery(Query[PlanReply]):
    """`plan/ROUND?wait=SECONDS`: asks for the plan of a round."""

    path: ClassVar[str] = "plan/{round:[0-9]{1,9}}"
    round: int
    wait: float = 0.0

    @property
    def target(self) -> str:
        """Path of this request after `/v1/`, with its arguments."""
        return f"plan/{self.round}?wait={self.wait:.3f}"


class RoundDoneRequest(Message, Call[Done]):
    """`round_done`: reports that this rank has finished a round and trained on its token ranges."""

    path: ClassVar[str] = "round_done"
    rank: RankId
    round: Count
    measured: Measured | None = None
    """Measurements of the whole site; only its leading rank sends them."""


class CheckpointRequest(Message, Call[Done]):
    """`checkpoint`: reports that this rank's part of a checkpoint is on disk."""

    path: ClassVar[str] = "checkpoint"
    rank: RankId
    tick: Count
    round: Count
    slot: Count
    """Number of finished slots of the round."""
    digests: Annotated[dict[Annotated[str, Field(max_length=200)], Digest], Field(max_length=1000)]
    """SHA-256 by file name."""


class SpoiledRequest(Message, Call[Done]):
    """`spoiled`: reports that this rank's files of the checkpoint at `tick` do not match their
    recorded digests."""

    path: ClassVar[str] = "spoiled"
    rank: RankId
    tick: Count
    reason: Line


class StateRequest(Message, Call[Done]):
    """`state`: submits this rank's signed statement of the model state that it holds."""

    path: ClassVar[str] = "state"
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
    """Checkpoints in order of tick, without those that a resume has superseded."""

    checkpoints: list[Checkpoint]


@dataclass(frozen=True)
class CheckpointsQuery(Query[Checkpoints]):
    """`checkpoints`: asks for the run's checkpoints."""

    path: ClassVar[str] = "checkpoints"


ReportKind = Literal[
    "round", "flush", "evaluation", "first_evaluation", "peer_evaluation", "tasks", "first_tasks",
    "warning",
]  # fmt: skip


class ReportRequest(Message, Call[ReportReply]):
    """`report`: one rank submits its site's metrics; repeats of (round, kind) are ignored."""

    path: ClassVar[str] = "report"
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


@dataclass(frozen=True)
class StatusQuery(Query[Status]):
    """`status?since=NUMBER&wait=SECONDS`: asks for the run's status."""

    path: ClassVar[str] = "status"
    since: int = 0
    wait: float = 0.0

    @property
    def target(self) -> str:
        """Path of this request after `/v1/`, with its arguments."""
        return f"status?since={self.since}&wait={self.wait:.3f}"


class LookRequest(Message, Call[Status]):
    """`look`: asks for the run's `Status` without a client certificate, with a site's token."""

    path: ClassVar[str] = "look"
    token: Annotated[str, Field(max_length=200)]


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
    """Which site got which sequence numbers, and whether it has trained on them."""

    entries: list[RangeEntry]
    next: dict[str, Count]
    """First sequence number that was never issued, by space."""
    pool: dict[str, list[tuple[Count, Count]]]
    """Returned ranges (start, count) that wait to be issued again, by space."""


@dataclass(frozen=True)
class LedgerQuery(Query[Ledger]):
    """`ledger`: asks for the ledger of token ranges."""

    path: ClassVar[str] = "ledger"
