"""What is known of one site of a run, and of one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.exchange_votes import RankKey

BANNED = "banned by the operator"


@dataclass
class Standing:
    """What a name keeps over all incarnations of its site, and when the run is resumed."""

    token_issue: int = 0
    """So many of its join tokens are void."""
    banned: bool = False
    """The operator lets nobody join by this name."""
    key: str = ""
    """Public key of the record, hex, by which its site has joined last."""
    bound: bool = False
    """Nobody may join with another key."""

    @property
    def bound_key(self) -> str:
        """The key that the name is bound to; empty for none."""
        return self.key if self.bound else ""

    def bind(self, key: str) -> bool:
        """From now on the name joins with `key`, if it gives one; True if it had another before."""
        changed = bool(key and self.key and key != self.key)
        if key:
            self.key, self.bound = key, True
        return changed


@dataclass
class SiteState:
    """One site of the run file, from its first enrolment on."""

    name: str
    incarnation: int = 0
    role: str = "absent"
    """absent, enrolled, entering, active, finished or gone."""
    reason: str = ""
    donor: str | None = None
    entered_from: str | None = None
    """Of an active site: whose state it had last entered with; None for a founder."""
    distrusts: set[str] = field(default_factory=set)
    """Donors with whose state it held another anchor than most, or that gave it a state that most
    do not hold: it enters from others first."""
    disputes: dict[str, int] = field(default_factory=dict)
    """With whom it had a broken link, whoever of the two said so: the last round of each."""
    tried: set[str] = field(default_factory=set)
    """While entering: donors whose state was none of the run's."""
    renewals: int = 0
    """How often this incarnation was told to fetch again what it lacks."""
    request: str = ""
    certificate: str = ""
    ready: set[tuple[int, int]] = field(default_factory=set)
    """(stage, shard) that hold the full state."""
    spoiled: bool = False
    """Since it took part last, the run has gone back because of its part of a checkpoint."""
    lacks: bool = False
    """It has found no part of the checkpoint that the run goes on from."""
    from_round: int = 0
    """While entering: first round none of whose exchanges was begun without it."""
    active_from: int = 0
    """First round that this incarnation contributes to."""
    rounds_done: int = 0
    """The round that it is in."""
    clocked: int | None = None
    """The last round of which the coordinator's clock has corrected what it measured."""
    done: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """Ranks that are through with a round, per unfinished round."""
    leave_round: int | None = None
    """First round that it takes no part in, if it is to leave."""
    left: set[tuple[int, int]] = field(default_factory=set)
    """While leaving: ranks that owe the run nothing any more."""
    finished: set[tuple[int, int]] = field(default_factory=set)
    complete: bool = True
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    standing: Standing = field(default_factory=Standing)

    def leaves_before(self, round_: int) -> bool:
        """It is to leave, and takes no part in `round_`."""
        return self.leave_round is not None and round_ >= self.leave_round

    def is_behind(self, round_: int) -> bool:
        """It was overtaken in or before `round_`, which the others end without it."""
        return self.role == "entering" and round_ < self.from_round


@dataclass
class CheckpointState:
    """One checkpoint: which ranks wrote what, and the sites that it is complete for."""

    round: int
    slot: int
    written: dict[RankKey, dict[str, str]] = field(default_factory=dict)
    sites: list[str] | None = None


def enrolled(before: SiteState, event: e.Enrolled) -> SiteState:
    """The next incarnation of a site, with what a name keeps of those before."""
    return SiteState(
        event.site,
        event.incarnation,
        "enrolled",
        request=event.request,
        certificate=event.certificate,
        metrics=before.metrics,
        distrusts=before.distrusts,
        standing=before.standing,
        disputes=before.disputes,
        spoiled=before.spoiled,
    )


def stand(site: SiteState, event: e.Banned | e.Unbanned | e.KeyForgotten) -> tuple[str, str]:
    """Apply what the operator says of a name; kind and text of the message about it."""
    standing = site.standing
    if isinstance(event, e.Banned):
        standing.banned = True
        if site.role in ("absent", "gone"):
            site.reason = BANNED
        return "leave", f"{site.name} is {BANNED}"
    standing.bound = False
    if isinstance(event, e.KeyForgotten):
        return "join", f"{site.name} may join with another key, by the operator's word"
    standing.banned, standing.token_issue = False, standing.token_issue + 1
    return "join", f"{site.name} may join again, with a new token"
