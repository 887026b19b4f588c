"""Everything that can happen to a run, as facts. The log of these is the state.

An event is a frozen dataclass of JSON values. Inputs (a vote, a report) and decisions that follow
from them (a plan, a contribution set) are events alike, so that replay never decides anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all events. `time`: Unix seconds, for people only; no decision reads it."""

    kinds: ClassVar[dict[str, type[Event]]] = {}
    stored_as: ClassVar[str]
    """Name of the class in the event log. It never changes: runs outlast the names in the code."""
    time: float

    def __init_subclass__(cls, kind: str | None = None) -> None:
        cls.stored_as = kind or cls.__name__
        Event.kinds[cls.stored_as] = cls

    def to_json(self) -> dict[str, Any]:
        """The fields, by name. Inverse: `decode`."""
        return asdict(self)

    @staticmethod
    def decode(kind: str, data: dict[str, Any]) -> Event:
        """The event that is stored as `kind`. Raises KeyError or TypeError for what no version
        wrote."""
        return Event.kinds[kind](**data)


@dataclass(frozen=True)
class OfRank(Event):
    """Base of what one rank did."""

    site: str
    stage: int
    shard: int


@dataclass(frozen=True)
class Created(Event):
    """The log begins. `digest` is the run file's."""

    digest: str
    run: str


@dataclass(frozen=True)
class Enrolled(Event):
    """A site was admitted. `request` is the SHA-256 of its signing request."""

    site: str
    incarnation: int
    request: str
    certificate: str
    versions: dict[str, str]
    data_digest: str | None
    key: str = ""
    """Its public key of the record, hex; empty if it gave none."""


@dataclass(frozen=True)
class Started(Event):
    """Enough sites are there: all of them enter."""

    sites: list[str]
    founder: str
    from_round: int | None = None
    """Who has to fetch its state receives from this round on; none: from the first."""


@dataclass(frozen=True)
class Entered(Event):
    """A site that came later begins to fetch state."""

    site: str
    donor: str
    from_round: int | None = None
    """It receives from this round on; none: from the first that is not begun."""
    starts: bool = False
    """The others wait for it with the start."""


@dataclass(frozen=True)
class CheckpointMissing(Event, kind="Lacking"):
    """A site that was to go on from a checkpoint has no part of it: the others start without it,
    and it enters."""

    site: str


@dataclass(frozen=True)
class StartupRestarted(Event, kind="Regathered"):
    """No start will come of the sites that are left: `sites`, which have begun to fetch state,
    have to join again, and the run waits for as many sites as at its beginning."""

    sites: list[str]


@dataclass(frozen=True)
class Ready(OfRank):
    """A rank of an entering site holds the full state."""


@dataclass(frozen=True)
class Shown(OfRank):
    """A rank of an active site tells the SHA-256 of its pieces while another site enters, by
    version (`entries.key_of`)."""

    pieces: dict[str, str]


@dataclass(frozen=True)
class Doubted(Event):
    """`donor` gave an entering site a state that most do not hold: it enters from `other`, if there
    is one."""

    site: str
    incarnation: int
    donor: str
    other: str | None


@dataclass(frozen=True)
class Renewed(Event):
    """An entering site fetches again what it lacks: most sites never told what they held of the
    versions that it was given, and hold newer ones by now."""

    site: str
    incarnation: int


@dataclass(frozen=True)
class Activated(Event):
    """Sites contribute from these rounds on, by site."""

    rounds: dict[str, int]
    since: dict[str, int] | None = None
    """The first rounds whose exchanges are theirs, by site: those that they have from a checkpoint
    are older. None: of all recorded rounds that name them."""


@dataclass(frozen=True)
class Overtaken(Event):
    """A site kept the others waiting for too long, or does not hold what most hold: they go on
    without it, and when it is through with the round it is in, it enters again from `donor`. It
    lives on and keeps its residual."""

    site: str
    incarnation: int
    donor: str
    reason: str
    from_round: int | None = None
    """As that of `Entered`."""
    lacks: list[str] = field(default_factory=list)
    """Not late: it does not hold what these sites have sent, and most do."""


@dataclass(frozen=True)
class SiteLost(Event, kind="Gone"):
    """A site has left, or is taken for dead. `failed`: not on purpose. `donor`: whose state it had
    entered with, if that was not what most sites hold."""

    site: str
    incarnation: int
    reason: str
    failed: bool
    donor: str | None = None


@dataclass(frozen=True)
class Leaving(Event):
    """A site is to go; `round` is the first that it takes no part in."""

    site: str
    incarnation: int
    round: int
    reason: str


@dataclass(frozen=True)
class Banned(Event):
    """The operator lets nobody join by this name any more; who has joined by it goes."""

    site: str


@dataclass(frozen=True)
class Unbanned(Event):
    """The operator takes a ban back. Tokens of the name from before stay void, and a site with
    another key may join."""

    site: str


@dataclass(frozen=True)
class KeyForgotten(Event):
    """The operator lets a site with another key join by this name, once."""

    site: str


@dataclass(frozen=True)
class RankLeft(OfRank, kind="Left"):
    """A rank of a leaving site is through with all that it takes part in."""


@dataclass(frozen=True)
class Planned(Event):
    """A round was planned; `plan` is a `RoundPlan` as JSON."""

    plan: dict[str, Any]


@dataclass(frozen=True)
class Sized(Event):
    """What payloads would be as large as: bytes by codec, stage and piece, summed over shards.

    Computed from the model once, where its shapes are known; plans are made from it.
    """

    payloads: dict[str, list[list[int]]]


@dataclass(frozen=True)
class HandedOver(Event):
    """The run goes on from another one (`dilocox.training.portable_checkpoint`): inner steps taken,
    and the ledger."""

    run: str
    steps: int
    ledger: dict[str, Any]


@dataclass(frozen=True)
class RoundDone(OfRank):
    """A rank is through with a round. `measured`: a `Measured` as JSON, if it gave one."""

    round: int
    measured: dict[str, Any] | None = None


@dataclass(frozen=True)
class Clocked(Event):
    """What a site has said of its steps in a round cannot be, by the coordinator's clock: they took
    `step_us` microseconds each, as far as that can be told."""

    site: str
    round: int
    step_us: int


@dataclass(frozen=True)
class Pinned(Event):
    """An exchange begins in the current epoch."""

    key: str


@dataclass(frozen=True)
class Voted(OfRank):
    """A rank's vote in an attempt of an exchange. `digest`: of its own payload, if given. Phase
    "fetched": it votes again after a `Fetching`, and only what it holds has changed."""

    key: str
    attempt: int
    phase: str
    held: list[str]
    contributes: bool
    digest: str | None
    opinions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """An `RankOpinion` as JSON by site."""
    committed: bool = True
    """The payload is the one that its rank had committed to, as far as the run demands it."""
    recommitted: bool = False
    """Its rank had committed to another one before a resume."""


@dataclass(frozen=True)
class Broke(OfRank):
    """A rank could not complete an attempt; `failed` names sites whose link broke. `excused`: those
    that are held up in an earlier exchange, and cannot have begun."""

    key: str
    attempt: int
    failed: list[str]
    excused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Retried(Event):
    """The attempt is over and another begins, in a group formed afresh."""

    key: str


@dataclass(frozen=True)
class Fetching(Event):
    """All have voted in an attempt of an exchange, and some ranks do not hold what most hold. They
    fetch it from others and vote again, and so do those others. `fetches`: a `Fetch` as JSON each.
    """

    key: str
    attempt: int
    fetches: list[dict[str, Any]]


@dataclass(frozen=True)
class Decided(Event):
    """The contribution set of an exchange: final if `decision` is "commit"; "average" fixes it for
    this attempt only."""

    key: str
    attempt: int
    decision: str
    set: list[str]
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """A `Verdict` as JSON by site."""
    shares: dict[str, list[list[int]]] = field(default_factory=dict)
    """What counts of each site by shard, in 65,536ths; empty: all of it."""
    usual: int | None = None
    """The gate's running mean of gains at this fragment, in millionths."""


@dataclass(frozen=True)
class Leased(Event):
    """Slots may be finished up to `tick`."""

    tick: int


@dataclass(frozen=True)
class EndingEarly(Event):
    """The next round to be planned is the flush, whatever steps are left."""

    reason: str


@dataclass(frozen=True)
class Stopping(Event):
    """The run ends at `tick`, to be resumed."""

    tick: int
    reason: str
    site: str = ""
    """Who has asked for it; empty: the operator."""

    @property
    def line(self) -> str:
        """What people are told."""
        return f"stopping at slot {self.tick}: {self.reason}{_asks(self.site)}"


@dataclass(frozen=True)
class CheckpointWritten(OfRank, kind="Wrote"):
    """A rank's part of a checkpoint is on disk."""

    tick: int
    round: int
    slot: int
    digests: dict[str, str]


@dataclass(frozen=True)
class CheckpointCommitted(Event, kind="Kept"):
    """The checkpoint at `tick` is complete for `sites`."""

    tick: int
    sites: list[str]


@dataclass(frozen=True)
class CheckpointCorrupt(OfRank, kind="Spoiled"):
    """A rank found its part of the checkpoint at `tick` damaged: nobody goes on from it."""

    tick: int
    reason: str


@dataclass(frozen=True)
class Reported(Event):
    """Metrics of a site's round."""

    site: str
    round: int
    kind: str
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Finished(OfRank):
    """A rank is done."""

    complete: bool


@dataclass(frozen=True)
class Ended(Event):
    """The run is over: `phase` is finished, stopped or failed. `site`: as that of `Stopping`."""

    phase: str
    reason: str
    site: str = ""

    @property
    def line(self) -> str:
        """What people are told."""
        said = f"{self.phase}: {self.reason}" if self.reason else self.phase
        return said + _asks(self.site)


@dataclass(frozen=True)
class Stored(Event):
    """A lasting key of the key-value store; value none: deleted. `site` has set it; empty: not
    known."""

    key: str
    value: str | None
    site: str = ""


@dataclass(frozen=True)
class Resumed(Event):
    """The run goes on from a checkpoint: what the log says after it is superseded.

    `plans` (those of rounds up to `round`), `ledger`, `measured`, `usual`, `held_out` and
    `ends_early` are in force again, as recorded.
    """

    tick: int
    round: int
    slot: int
    plans: list[dict[str, Any]] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    measured: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    """(round, site, `Measured` as JSON) of rounds that plans to come look back at."""
    usual: dict[str, int | None] = field(default_factory=dict)
    """The gate's running means by stage and fragment."""
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    """A `HeldOut` as JSON by site."""
    ends_early: str = ""


def _asks(site: str) -> str:
    return f" (as {site} asks)" if site else ""
