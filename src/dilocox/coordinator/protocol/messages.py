"""Requests and responses of the coordinator, version 1: JSON over mutually authenticated TLS.

A request is a POST of one model to `/v1/<name>`, or a GET (plan, status, checkpoints, ledger); a
response is one model, or `Refusal` with status 400 or above. Bounds are checked.
Time is (round, slot); a *tick* is a number of slots that have ended since the start of the run.
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
"""Largest request that is read, in bytes."""

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
    """Why a call was refused: one line with the thing, the reason and the mend."""

    error: str
    kind: Literal[
        "malformed", "refused", "join", "taken", "gone", "conflict", "over", "ended",
        "stopped", "busy", "quota",
    ]  # fmt: skip


class Done(Message):
    """Nothing to say but that it is recorded."""


class Versions(Message):
    """Versions that must be equal at all sites (python: major.minor; torch: without +local)."""

    dilocox: Annotated[str, Field(max_length=64)]
    torch: Annotated[str, Field(max_length=64)]
    python: Annotated[str, Field(max_length=64)]
    defaults: Annotated[str, Field(max_length=64)] = ""
    """Of all keys of the run file: copies of dilocox between two versions may differ in them, and
    a run's digest leaves defaults out."""


class LookRequest(Message):
    """`look`: the run in one picture, for who holds a site's token; without a certificate."""

    token: Annotated[str, Field(max_length=200)]


class EnrolRequest(Message):
    """`enrol`: the call without a client certificate that is made once per site."""

    site: SiteName
    token: Annotated[str, Field(max_length=200)]
    run_digest: Digest
    versions: Versions
    stages: Small
    shards: Small
    csr: Annotated[str, Field(max_length=8192)]
    """PEM certificate signing request of the site's key."""
    data_digest: Digest | None = None
    """Digest of the token files' manifest, if the site has them already."""
    record_key: Digest | None = None
    """Public Ed25519 key of the site's statements in the run's record."""
    record_proof: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")] | None = None
    """That who enrols holds its private half (see `record_keys`)."""


class EpochMember(Message):
    """One live site of a membership epoch."""

    site: SiteName
    incarnation: Count
    role: Literal["active", "entering"]


class Epoch(Message):
    """A membership epoch: the live sites in the run file's order. Id 0: the run has not begun."""

    id: Count
    members: list[EpochMember]


class EnrolReply(Message):
    """What an enrolled site needs to know."""

    incarnation: Count
    certificate: str
    """PEM, CN = site, signed by the run's certificate authority."""
    authority: str
    """PEM of the run's certificate authority."""
    epoch: Epoch
    record_run: str = ""
    """The run's id in its record; empty if nothing is recorded."""
    record_manifest: str = ""
    """The first entry of the record's log, which the site checks and accepts before all else."""


class ReadyRequest(Message):
    """`ready`: this rank of an entering site holds the full state."""

    rank: RankId


class Entering(Message):
    """A site that is fetching state. `donor` is none for the founder, which makes theta_0."""

    site: SiteName
    incarnation: Count
    donor: SiteName | None
    from_round: Count
    """First round none of whose exchanges was begun without it: it receives from there on."""
    renewals: Count = 0
    """How often it was told to fetch again what it lacks."""


class BeatRequest(Message):
    """`beat`: this rank is alive. `tick` = slots it has finished since the start of the run."""

    rank: RankId
    tick: Count
    round: Count
    slot: Count
    slot_seconds: Annotated[float, Field(gt=0.0, le=1e7)] | None = None
    """Seconds per slot lately, waits for the lease not counted, if known."""
    building: bool = False
    """It is alive, but cannot take part yet: it still builds and fills its part of the model."""


Phase = Literal["enrolling", "starting", "running", "stopping", "finished", "stopped", "failed"]


class BeatReply(Message):
    """What every rank must know all the time."""

    phase: Phase
    reason: str
    """Of `failed` and `stopping`; else empty."""
    role: Literal["enrolled", "entering", "active"]
    """Of this rank's site."""
    donor: SiteName | None
    """While entering: the site to fetch from; none for the founder."""
    founder: SiteName | None
    """The site that makes theta_0 (or loads the checkpoint); none before the start."""
    lease: Count
    """Slots may be finished up to and including this tick."""
    stop_tick: Count | None
    """All ranks stop at the end of this slot and write a checkpoint."""
    epoch: Epoch
    entering: list[Entering]
    waits_for_sites: bool = False
    """Fewer sites than `outer.min_sites` are active: nothing is decided until one comes back."""


class LeaveRequest(Message):
    """`leave`: this site goes, at once. `failed`: because something broke."""

    rank: RankId
    reason: Line
    failed: bool = False


class RetireRequest(Message):
    """`retire`: a site is to finish the rounds that are planned for it and go; `now`: at once."""

    site: SiteName
    reason: Line
    now: bool = False


StandingChange = Literal["ban", "unban", "forget-key"]


class StandingRequest(Message):
    """`standing`: from now on nobody may join by a name (`ban`), or somebody may again (`unban`),
    or a site with another key (`forget-key`). For the operator alone."""

    site: SiteName
    change: StandingChange


class RetireReply(Message):
    """What becomes of it, in one line for people."""

    text: str


class DepartRequest(Message):
    """`depart`: this rank of a leaving site owes the run nothing any more."""

    rank: RankId


class StopRequest(Message):
    """`stop`: end the run at a slot end, with a checkpoint that can be resumed."""

    reason: Line


class StopReply(Message):
    """Where the run will stop."""

    stop_tick: Count


class FailRequest(Message):
    """`fail`: this run cannot go on."""

    rank: RankId
    reason: Line


class FinishRequest(Message):
    """`finish`: this rank is done. `complete`: with the whole run (not only up to a stop)."""

    rank: RankId
    complete: bool = True


# --- plans and rounds ------------------------------------------------------------------------


class PlanReply(Message):
    """`plan/ROUND?wait=SECONDS`: the plan, or what it waits for."""

    plan: RoundPlan | None
    waiting_for: str
    leave: bool = False
    """The asking site is to leave before this round."""
    receive: bool = False
    """The asking site enters: it takes no part in this round, whatever the plan says."""


class RoundDoneRequest(Message):
    """`round_done`: this rank is through with a round and its ranges are trained on."""

    rank: RankId
    round: Count
    measured: Measured | None = None
    """From the site's leading rank."""


# --- exchange --------------------------------------------------------------------------------


class ExchangeMember(Message):
    """One site of an exchange. A "member" contributes and votes; "entering" only receives."""

    site: SiteName
    incarnation: Count
    role: Literal["member", "entering"]


class BeginRequest(Message):
    """`exchange/begin`: which group carries this exchange?

    With a commitment it waits until all who vote have committed to their contributions: nobody
    sends a payload, and so nobody can see one, before.
    """

    key: KeyText
    rank: RankId
    commitment: SignedText | None = None
    """This rank's signed statement of what it will contribute, if the run is recorded."""
    wait: Wait = 0.0


class BeginReply(Message):
    """The group of one attempt of an exchange; the same for all ranks of the key."""

    epoch: Count
    attempt: Count
    """From 1; a new attempt is a new group or a new set of votes."""
    members: list[ExchangeMember]
    """Run file order."""
    decided: bool
    """The contribution set is fixed already: ask for it with a vote."""
    waiting_for: list[str] = Field(default_factory=list)
    """Who has not committed yet: begin again, and send nothing before nobody is left."""


class VoteRequest(Message):
    """`exchange/vote`: what this rank holds, and wait for the decision.

    Phase "held": transfers are over. Phase "fetched": so is what the reply "fetch" asked for. Phase
    "done": the average is computed (exchange "reduce").
    `failed` names sites whose link broke: the attempt is then repeated for everyone.
    """

    key: KeyText
    rank: RankId
    attempt: Count
    phase: VotePhase = "held"
    held: Sites = Field(default_factory=list)
    """Sites whose contribution is whole here, this site's own among them."""
    contributes: bool = True
    """This rank's own contribution may be counted."""
    digests: Annotated[dict[SiteName, Digest], Field(max_length=4096, default_factory=dict)]
    """SHA-256 of each held payload; the own one is logged."""
    statement: SignedText | None = None
    """The own payload's signed statement, if the run is recorded."""
    opinions: Annotated[dict[SiteName, RankOpinion], Field(max_length=4096, default_factory=dict)]
    broken: bool = False
    """The attempt cannot be completed here; `failed` says by whose link, if known."""
    failed: Sites = Field(default_factory=list)
    observer: bool = False
    """An entering rank: waits for the decision without a vote."""
    wait: Wait = MAX_POLL


class VoteReply(Message):
    """The decision, or that there is none yet.

    commit   apply `set` (gather) or the average that was computed (reduce); final.
    average  reduce only: compute over `set`, then vote "done".
    fetch    gather only: send and receive what `fetches` says, in its order, then vote "fetched".
    repeat   this attempt is over: begin again; `attempt` and `epoch` are the new ones.
    wait     ask again; `waiting_for` names who has not voted.
    """

    decision: Literal["commit", "average", "fetch", "repeat", "wait"]
    set: list[SiteName]
    """Contribution set, run file order; may be empty."""
    attempt: Count
    epoch: Count
    waiting_for: list[str]
    shares: dict[SiteName, Shares] = Field(default_factory=dict)
    """What counts of each site's part at the asking rank; empty: all of it."""
    fetches: list[Fetch] = Field(default_factory=list)
    """With "fetch": those of the asking rank's shard."""
    late: dict[SiteName, float] = Field(default_factory=dict)
    """With "commit": seconds after the first site at which each was there, as far as it is known.
    Nothing is decided from it."""


class CheckpointRequest(Message):
    """`checkpoint`: this rank's part of a checkpoint is on disk."""

    rank: RankId
    tick: Count
    round: Count
    slot: Count
    """Slots of the round that are finished."""
    digests: Annotated[dict[Annotated[str, Field(max_length=200)], Digest], Field(max_length=1000)]
    """SHA-256 by file name."""


class SpoiledRequest(Message):
    """`spoiled`: this rank's part of the checkpoint at `tick` is not what was recorded."""

    rank: RankId
    tick: Count
    reason: Line


class StateRequest(Message):
    """`state`: this rank's signed statement of the model state that it holds."""

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
    """Ranks that have written it."""
    digests: dict[str, dict[str, str]]
    """By rank text, by file name."""


class Checkpoints(Message):
    """`checkpoints`: in order of tick; those of an abandoned course are not among them."""

    checkpoints: list[Checkpoint]


ReportKind = Literal[
    "round", "flush", "evaluation", "first_evaluation", "peer_evaluation", "warning"
]


class ReportRequest(Message):
    """`report`: metrics of a site's round, from one rank of the site. The same (round, kind)
    twice counts once."""

    rank: RankId
    round: Count
    kind: ReportKind = "round"
    metrics: Annotated[dict[str, Any], Field(max_length=1000)]


class SiteStatus(Message):
    """One site for the display."""

    site: SiteName
    incarnation: Count
    role: Literal["absent", "enrolled", "entering", "active", "finished", "gone"]
    reason: str
    banned: bool = False
    """The operator lets nobody join by this name."""
    rounds_done: Count
    metrics: dict[str, dict[str, Any]]
    """Latest report by kind, with its `round`."""


class FeedMessage(Message):
    """One line of what happened."""

    sequence: Count
    time: float
    """Unix seconds."""
    kind: Literal["join", "leave", "plan", "decision", "checkpoint", "phase"]
    text: str


class Status(Message):
    """The run in one picture."""

    phase: Phase
    reason: str
    run: str
    steps: Count
    """Inner steps of a site in the whole run."""
    plans: Count
    """Rounds planned so far."""
    lease: Count
    stop_tick: Count | None
    epoch: Epoch
    sites: list[SiteStatus]
    messages: list[FeedMessage]
    """Those after `since`, at most the latest 1,000."""
    sequence: Count
    """Rises with everything that a display shows; give it back as `since`."""


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
    """`ledger`: who was given which sequence numbers, and what became of them."""

    entries: list[RangeEntry]
    next: dict[str, Count]
    """First number never issued, per space."""
    pool: dict[str, list[tuple[Count, Count]]]
    """Returned (start, count) not issued again yet, per space."""
