"""Attacks by messages: a dishonest site lies to the coordinator and to other sites, in real runs.

Each attack replaces a method of the engine before the sites' processes are forked. The new method
attacks only in the processes of the dishonest site. None of this code is part of dilocox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.verdicts import RankVote
from dilocox.transport.attempt import Attempt

ALTERED = "rome"
FALSE_FRAGMENT = 77
BY_SPEED = (("control.steps", "by-speed"), ("outer.inner_steps", 60))
DRIP = 8.0
"""Seconds of silence before each message of an exchange."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A dishonest member: its name in the table, the method that it replaces, and keys of the
    run."""

    name: str
    owner: type[Any]
    method: str
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    sets: tuple[tuple[str, Any], ...] = ()
    """Keys of the run file, as `section.key`, and their values."""


def is_altered() -> bool:
    """Return whether this process is a rank of the altered site."""
    return multiprocessing.current_process().name.startswith(f"{ALTERED}-")


@contextlib.contextmanager
def at_the_altered_site(member: Member) -> Iterator[None]:
    """Make `member` act in processes of the altered site that are forked in this context."""
    honest = getattr(member.owner, member.method)
    dishonest = member.replace(honest)

    def either(self: Any, *arguments: Any, **named: Any) -> Any:
        return (dishonest if is_altered() else honest)(self, *arguments, **named)

    setattr(member.owner, member.method, either)
    try:
        yield
    finally:
        setattr(member.owner, member.method, honest)


def _holds_nothing(honest: Callable[..., Any]) -> Callable[..., Any]:
    def vote(
        self: CoordinatorClient, key: ExchangeKey, attempt: int, vote: RankVote, **named: Any
    ) -> Any:
        return honest(self, key, attempt, dataclasses.replace(vote, held=[ALTERED]), **named)

    return vote


def _begins_what_there_is_not(honest: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: CoordinatorClient, key: ExchangeKey, *arguments: Any, **named: Any) -> Any:
        if key.kind == "outer" and key.round >= 2:
            key = key._replace(fragment=FALSE_FRAGMENT)
        return honest(self, key, *arguments, **named)

    return begin


def _infinitely_fast(honest: Callable[..., Any]) -> Callable[..., Any]:
    def round_done(self: CoordinatorClient, round_: int, measured: Any = None) -> Any:
        if measured is not None:
            measured = measured.model_copy(update={"step_us": 1})
        return honest(self, round_, measured)

    return round_done


def _reports_another(honest: Callable[..., Any]) -> Callable[..., Any]:
    def vote(
        self: CoordinatorClient, key: ExchangeKey, attempt: int, vote: RankVote, **named: Any
    ) -> Any:
        if vote.phase == "held":
            return self.report_broken(key, attempt, ["oslo"])
        return honest(self, key, attempt, vote, **named)

    return vote


def _drips(honest: Callable[..., Any]) -> Callable[..., Any]:
    def swap(self: Attempt, *arguments: Any, **named: Any) -> Any:
        time.sleep(DRIP)
        return honest(self, *arguments, **named)

    return swap


def _lies_about_its_anchor(honest: Callable[..., Any]) -> Callable[..., Any]:
    def report(self: CoordinatorClient, round_: int, metrics: Any, kind: Any = "round") -> Any:
        if "anchor_digest" in metrics:
            metrics = {**metrics, "anchor_digest": "f" * 64}
        return honest(self, round_, metrics, kind)

    return report


SHORT = (("network.heartbeat", 10.0), ("network.link_timeout", 16.0))
"""Short time-outs of the other sites, in seconds, so that a row takes a minute."""
MEMBERS = (
    Member("says it holds nothing", CoordinatorClient, "vote", _holds_nothing),
    Member(
        "begins what there is not", CoordinatorClient, "begin", _begins_what_there_is_not,
        SHORT,
    ),
    Member(
        "is infinitely fast", CoordinatorClient, "round_done", _infinitely_fast,
        BY_SPEED,
    ),
    Member("reports another broken", CoordinatorClient, "vote", _reports_another),
    Member("drips", Attempt, "swap", _drips, SHORT),
    Member("lies about its anchor", CoordinatorClient, "report", _lies_about_its_anchor),
)  # fmt: skip
