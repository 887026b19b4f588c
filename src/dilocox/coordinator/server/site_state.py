"""State that the coordinator keeps about one site, and about one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.exchange_votes import RankKey

BANNED = "banned by the operator"


@dataclass
class Standing:
    """State of a site's name that survives new incarnations of the site and a resume of the run."""

    token_issue: int = 0
    """Number of the valid join token; all tokens with lower numbers are void."""
    banned: bool = False
    """True if the operator lets no site join under this name."""
    key: str = ""
    """Public record key, hex, with which the site joined last."""
    bound: bool = False
    """True if the site may join only with `key`."""

    @property
    def bound_key(self) -> str:
        """The key to which the name is bound; empty if it is not bound."""
        return self.key if self.bound else ""

    def bind(self, key: str) -> bool:
        """Bind the name to `key`, unless it is empty. Returns True if it had another key before."""
        changed = bool(key and self.key and key != self.key)
        if key:
            self.key, self.bound = key, True
        return changed


@dataclass
class SiteState:
    """State of one site of the run file."""

    name: str
    incarnation: int = 0
    role: str = "absent"
    """One of absent, enrolled, entering, active, finished and gone (it has left or is lost)."""
    reason: str = ""
    """Why the site is gone, or may not join; else empty."""
    donor: str | None = None
    """The site from which this entering site fetches state. None for the founder."""
    entered_from: str | None = None
    """Donor with whose state this active site entered last. None if it was there from the start."""
    distrusts: set[str] = field(default_factory=set)
    """Donors whose state differed from that of most sites. The site enters from others first."""
    disputes: dict[str, int] = field(default_factory=dict)
    """Sites with which it had a broken link, reported by either side, and the last such round."""
    tried: set[str] = field(default_factory=set)
    """While entering: donors whose state was not that of most sites."""
    renewals: int = 0
    """How often this incarnation was told to fetch missing pieces again."""
    request: str = ""
    """SHA-256 of the certificate signing request of its enrolment, hex."""
    certificate: str = ""
    """Client certificate of this incarnation, PEM."""
    ready: set[tuple[int, int]] = field(default_factory=set)
    """Ranks (stage, shard) that hold the full state."""
    spoiled: bool = False
    """True if the run went back to an earlier checkpoint because this site's part was damaged, and
    the site has not become active since."""
    lacks: bool = False
    """True if the site found no part of its own of the checkpoint from which the run is resumed."""
    from_round: int = 0
    """While entering: first round in which no exchange began without the site."""
    active_from: int = 0
    """First round to which this incarnation contributes."""
    rounds_done: int = 0
    """The site's current round: all earlier rounds are done."""
    clocked: int | None = None
    """Last round in which the coordinator's clock corrected the site's measurement, if any."""
    done: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """Ranks (stage, shard) that have finished a round, by unfinished round."""
    leave_round: int | None = None
    """First round without the site. None: the site is not leaving."""
    left: set[tuple[int, int]] = field(default_factory=set)
    """While leaving: ranks (stage, shard) that have finished all of their exchanges."""
    finished: set[tuple[int, int]] = field(default_factory=set)
    """Ranks (stage, shard) that have finished the run, or stopped."""
    complete: bool = True
    """True unless a rank finished before the end of the run, at a stop."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Latest report by kind."""
    standing: Standing = field(default_factory=Standing)

    def leaves_before(self, round_: int) -> bool:
        """Return whether the site is leaving and takes no part in `round_`."""
        return self.leave_round is not None and round_ >= self.leave_round

    def is_behind(self, round_: int) -> bool:
        """Return whether the site was overtaken, so that the others end `round_` without it."""
        return self.role == "entering" and round_ < self.from_round


@dataclass
class CheckpointState:
    """State of one checkpoint."""

    round: int
    slot: int
    written: dict[RankKey, dict[str, str]] = field(default_factory=dict)
    """SHA-256 by file name, for every rank that has written its part."""
    sites: list[str] | None = None
    """Sites whose ranks have all written their parts. None: the checkpoint is not complete."""


def enrolled(before: SiteState, event: e.Enrolled) -> SiteState:
    """Return the state of a site's next incarnation, with the fields that outlast incarnations."""
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
    """Apply the operator's change of a name's standing. Returns (kind, text) of a feed message."""
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
