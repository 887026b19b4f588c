"""All events that can change a run. The state of a run is the result of its logged events.

An event is a frozen dataclass of JSON values. Inputs (a vote, a report) are events, and so are the
decisions that follow from them (a plan, a contribution set). So replay never decides anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all events. `time` is in Unix seconds and for people only; no decision reads it."""

    kinds: ClassVar[dict[str, type[Event]]] = {}
    stored_as: ClassVar[str]
    """Name of the class in the event log. It never changes, so that old logs stay readable."""
    time: float

    def __init_subclass__(cls, kind: str | None = None) -> None:
        cls.stored_as = kind or cls.__name__
        Event.kinds[cls.stored_as] = cls

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; `decode` is the inverse."""
        return asdict(self)

    @staticmethod
    def decode(kind: str, data: dict[str, Any]) -> Event:
        """Return the event that is stored as `kind` with the fields `data`.

        Raises `KeyError` for an unknown kind and `TypeError` for unknown or missing fields."""
        return Event.kinds[kind](**data)


@dataclass(frozen=True)
class OfRank(Event):
    """Base of events about one rank."""

    site: str
    stage: int
    shard: int


@dataclass(frozen=True)
class Created(Event):
    """First event of a log. `digest` is the digest of the run file."""

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
    """Public record key of the site, hex; empty if the site has none."""
    base_digest: str | None = None
    """Digest of the site's frozen base model; None if the run has no adapters."""


@dataclass(frozen=True)
class Started(Event):
    """Enough sites have enrolled: `sites` enter, and the run starts."""

    sites: list[str]
    founder: str
    from_round: int | None = None
    """Round from which sites that fetch state receive exchanges. None: the first round."""


@dataclass(frozen=True)
class Entered(Event):
    """A site that came later begins to fetch state from `donor`."""

    site: str
    donor: str
    from_round: int | None = None
    """Round from which the site receives exchanges. None: the first that has not begun."""
    starts: bool = False
    """True if the start waits for this site."""


@dataclass(frozen=True)
class CheckpointMissing(Event, kind="Lacking"):
    """A site that should resume from a checkpoint has no part of it. The others start without the
    site, and it enters."""

    site: str


@dataclass(frozen=True)
class StartupRestarted(Event, kind="Regathered"):
    """The sites that are left cannot start. `sites`, which have begun to fetch state, have to join
    again, and the run waits for as many sites as at its beginning."""

    sites: list[str]


@dataclass(frozen=True)
class Ready(OfRank):
    """A rank of an entering site holds the full state."""


@dataclass(frozen=True)
class Shown(OfRank):
    """A rank of an active site reported the SHA-256 of its pieces while another site enters, by
    version (`entry_requests.key_of`)."""

    pieces: dict[str, str]


@dataclass(frozen=True)
class Doubted(Event):
    """`donor` gave an entering site a state that most sites do not hold. The site enters from the
    donor `other` instead. None: no other donor is left."""

    site: str
    incarnation: int
    donor: str
    other: str | None


@dataclass(frozen=True)
class Renewed(Event):
    """An entering site fetches missing pieces again. Most sites never reported digests of the
    versions that it got. All sites hold newer versions now, so nobody can check the old versions.
    """

    site: str
    incarnation: int


@dataclass(frozen=True)
class Activated(Event):
    """Sites become active: `rounds` has each site's first round of training."""

    rounds: dict[str, int]
    since: dict[str, int] | None = None
    """First round in whose exchanges each site takes part; earlier than `rounds` for exchanges in
    flight from a checkpoint. None (old logs): all recorded rounds that name the site."""


@dataclass(frozen=True)
class Overtaken(Event):
    """The other sites go on without a site: it is too late, or lacks contributions that most hold.

    The site ends its current round, then enters again from `donor`. It keeps its residual.
    Messages for people say that the site is left behind.
    """

    site: str
    incarnation: int
    donor: str
    reason: str
    from_round: int | None = None
    """As in `Entered`."""
    lacks: list[str] = field(default_factory=list)
    """Sites whose contributions this site does not hold, but most sites do. Empty: it was late."""


@dataclass(frozen=True)
class SiteLost(Event, kind="Gone"):
    """A site has left or is lost. `failed`: it did not leave on purpose. `donor`: the donor of the
    state with which it had entered, if most sites hold another state."""

    site: str
    incarnation: int
    reason: str
    failed: bool
    donor: str | None = None


@dataclass(frozen=True)
class Leaving(Event):
    """A site is leaving; `round` is the first round without it."""

    site: str
    incarnation: int
    round: int
    reason: str


@dataclass(frozen=True)
class Banned(Event):
    """The operator bans a name: no site may join under it, and a site that has joined is lost."""

    site: str


@dataclass(frozen=True)
class Unbanned(Event):
    """The operator lifts a ban. Earlier tokens of the name stay void, and a site with another key
    may join."""

    site: str


@dataclass(frozen=True)
class KeyForgotten(Event):
    """The operator lets a site with another key join under this name, once."""

    site: str


@dataclass(frozen=True)
class RankLeft(OfRank, kind="Left"):
    """A rank of a leaving site has finished all of its exchanges."""


@dataclass(frozen=True)
class Planned(Event):
    """A round was planned; `plan` is a `RoundPlan` as JSON."""

    plan: dict[str, Any]


@dataclass(frozen=True)
class Sized(Event):
    """Sizes that payloads would have: bytes by codec, stage and piece, summed over shards.

    Sizes are computed once, from the shapes of the model. Plans are made from them.
    """

    payloads: dict[str, list[list[int]]]


@dataclass(frozen=True)
class HandedOver(Event):
    """This run continues the run `run` (`dilocox.training.portable_checkpoint`): inner steps that
    `run` has taken, and its ledger."""

    run: str
    steps: int
    ledger: dict[str, Any]


@dataclass(frozen=True)
class RoundDone(OfRank):
    """A rank has finished a round. `measured`: its `Measured` as JSON, if it sent one."""

    round: int
    measured: dict[str, Any] | None = None


@dataclass(frozen=True)
class Clocked(Event):
    """By the coordinator's clock, a site's inner steps cannot have taken the time it reported.
    `step_us` is the corrected estimate, in microseconds per step."""

    site: str
    round: int
    step_us: int


@dataclass(frozen=True)
class Pinned(Event):
    """An exchange begins in the current epoch."""

    key: str


@dataclass(frozen=True)
class Voted(OfRank):
    """A rank's vote in an attempt of an exchange. `digest`: SHA-256 of its own payload, if given.
    In phase "fetched" it votes again after a `Fetching`; only `held` and `opinions` count then."""

    key: str
    attempt: int
    phase: str
    held: list[str]
    contributes: bool
    digest: str | None
    opinions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`RankOpinion` as JSON by site."""
    committed: bool = True
    """False if the run demands commitments and the rank had not committed to this payload."""
    recommitted: bool = False
    """True if the rank had committed to another payload before a resume."""


@dataclass(frozen=True)
class Broke(OfRank):
    """A rank could not complete an attempt; `failed` names sites whose link broke. `excused` names
    other reported sites: an earlier exchange holds them up, so they cannot have begun this one."""

    key: str
    attempt: int
    failed: list[str]
    excused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Retried(Event):
    """The attempt has ended, and another begins in a new group."""

    key: str


@dataclass(frozen=True)
class Fetching(Event):
    """All ranks have voted in an attempt, and some ranks lack payloads that most hold. These ranks
    fetch the payloads from other ranks. Then both sides vote again. `fetches`: each a `Fetch` as
    JSON."""

    key: str
    attempt: int
    fetches: list[dict[str, Any]]


@dataclass(frozen=True)
class Decided(Event):
    """The contribution set of an exchange. With the `decision` "commit" the set is final; with
    "average" it is for this attempt only."""

    key: str
    attempt: int
    decision: str
    set: list[str]
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`Verdict` as JSON by site."""
    shares: dict[str, list[list[int]]] = field(default_factory=dict)
    """Shares that count, by site and shard, in 65,536ths; empty: all payloads count in full."""
    usual: int | None = None
    """The gate's running mean of gains for this fragment, in millionths."""


@dataclass(frozen=True)
class Leased(Event):
    """Ranks may finish slots up to and including `tick`."""

    tick: int


@dataclass(frozen=True)
class EndingEarly(Event):
    """The next round to be planned is the flush, although steps are left."""

    reason: str


@dataclass(frozen=True)
class Stopping(Event):
    """The run stops at `tick`, with a checkpoint that can be resumed."""

    tick: int
    reason: str
    site: str = ""
    """Site that asked for the stop; empty: the operator."""

    @property
    def line(self) -> str:
        """The message for people."""
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
    """A rank found its part of the checkpoint at `tick` damaged: the checkpoint is discarded."""

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
    """A rank is done: with the whole run if `complete`, else up to a stop."""

    complete: bool


@dataclass(frozen=True)
class Ended(Event):
    """The run has ended: `phase` is finished, stopped or failed. `site` is as in `Stopping`."""

    phase: str
    reason: str
    site: str = ""

    @property
    def line(self) -> str:
        """The message for people."""
        said = f"{self.phase}: {self.reason}" if self.reason else self.phase
        return said + _asks(self.site)


@dataclass(frozen=True)
class Stored(Event):
    """A persistent key of the key-value store was set by `site` (empty: not known), or deleted if
    `value` is None."""

    key: str
    value: str | None
    site: str = ""


@dataclass(frozen=True)
class Resumed(Event):
    """The run resumes from a checkpoint; events after the checkpoint no longer count.

    `plans` (of rounds up to `round`), `ledger`, `measured`, `usual`, `held_out` and `ends_early`
    are restored to these recorded values.
    """

    tick: int
    round: int
    slot: int
    plans: list[dict[str, Any]] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    measured: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    """(round, site, `Measured` as JSON) for rounds that later plans depend on."""
    usual: dict[str, int | None] = field(default_factory=dict)
    """The gate's running means by stage and fragment."""
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`HeldOut` as JSON by site."""
    ends_early: str = ""


def _asks(site: str) -> str:
    return f" (as {site} asks)" if site else ""
