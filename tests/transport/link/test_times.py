"""A limit on a whole transfer: who lets every piece wait a little is named, slow links go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.compression import compressor
from dilocox.coordinator.protocol.messages import BeginReply, ExchangeKey, ExchangeMember
from dilocox.outer.contribution import Contribution
from dilocox.transport import attempt as attempts
from dilocox.transport.attempt import Attempt, RepeatError
from dilocox.transport.exchange import exchange
from dilocox.transport.exchange_worker import LinkSlot, OrderedLock
from dilocox.transport.link import state
from dilocox.transport.link import times as link_times
from dilocox.transport.link import transfer as transfers
from dilocox.transport.link.secure_stream import SecureStream
from dilocox.transport.link.times import FACTOR, LinkTimes
from dilocox.transport.link.transfer import STEP_BYTES, Transfer
from tests.support.exchanging import GEOMETRY, LENGTH, WEIGHTS, SharedBallot, values_of
from tests.support.linked import group_of
from tests.support.thread_sites import MemoryStore, run_each, shared_store

pytestmark = pytest.mark.alone

SILENCE, PAUSE, PIECE = 3.0, 0.25, 100
"""Seconds and bytes: a payload has 16 pieces, each of which comes in time."""
USUAL = 0.01
"""Seconds that most transfers have taken before, whatever this machine is busy with now."""


def transfer(size: int, seconds: float = 0.0, site: str = "b", sends: bool = False) -> Transfer:
    made = SimpleNamespace(site=site, sends=sends, size=size, posted=10.0, ended=10.0 + seconds)
    return cast(Transfer, made)


def test_the_limit_follows_from_what_was_usual_on_the_link() -> None:
    times = LinkTimes(120.0)
    # Nothing is known: every piece by itself may be silent.
    assert times.limit(transfer(10 * STEP_BYTES)) == 11 * 120.0
    for seconds in (50.0, 52.0, 900.0, 51.0, 49.0):
        times.note(transfer(40_000_000, seconds))
    assert times.usual(transfer(41_000_000)) == 51.0
    assert times.limit(transfer(41_000_000)) == FACTOR * 51.0
    # In proportion to a smaller one; a smaller one takes no longer than a larger one.
    assert times.limit(transfer(160_000_000)) == FACTOR * 4 * 51.0
    assert times.limit(transfer(1000)) == FACTOR * 51.0
    times.note(transfer(1000, 0.5))
    assert times.limit(transfer(1000)) == 120.0
    assert times.limit(transfer(1000), 0.75) == 90.0
    # Another site's link, and the other direction, are their own.
    assert times.limit(transfer(1000, site="c")) == 240.0
    assert times.limit(transfer(1000, sends=True)) == 240.0
    assert times.overdue(transfer(1000), 119.0) is None
    assert times.overdue(transfer(1000), 121.0) == (
        "link to b is too slow: 1000 bytes from it are not through after 120 s, usually within 0.5 "
        "s"
    )


class Slow:
    """Makes this process pause before each piece that it sends, on whatever connection."""

    def __init__(self) -> None:
        self.pause = 0.0
        fast = SecureStream.send

        def late(stream: SecureStream, *parts: bytes | memoryview) -> None:
            if len(parts) > 1:
                time.sleep(self.pause)
            fast(stream, *parts)

        SecureStream.send = late  # type: ignore[method-assign]


@dataclass
class Ballot(SharedBallot):
    """Its group is silent for `SILENCE` at most; `backoff_delays` by round slow what this site
    sends, in a process of its own."""

    pauses: Sequence[float] = ()
    slow: Slow = field(default_factory=Slow)

    def begin(self, key: ExchangeKey, commitment: str | None = None) -> BeginReply:
        if self.group_of is None:
            self.group_of = group_of(
                self.store, "epoch/1/test", self.members, self.me, silence=SILENCE
            )
        self.slow.pause = self.pauses[key.round] if self.pauses else 0.0
        return super().begin(key, commitment)


def course(
    monkeypatch: pytest.MonkeyPatch, pauses: Sequence[float], usual: float | None = None
) -> Mapping[str, Any]:
    """Seconds of every exchange of three sites, or what ended it; `backoff_delays` of the last by
    round.

    `usual`: seconds that transfers have taken before, if there were any.
    """
    monkeypatch.setattr(state, "CHUNK_BYTES", PIECE)
    for module in (transfers, link_times):
        monkeypatch.setattr(module, "STEP_BYTES", PIECE)

    def site(me: str, store: MemoryStore) -> Callable[[], Any]:
        def go() -> Any:
            ballot = Ballot(store, me, pauses=pauses if me == "oslo" else ())
            times, turns, took = LinkTimes(SILENCE), OrderedLock(), []
            for site in () if usual is None else 2 * len(pauses) * list(WEIGHTS):
                for sends in (False, True):
                    times.note(transfer(LENGTH * 4, usual, site, sends))
            for round_ in range(len(pauses)):
                key, start = ExchangeKey.outer(round_, 0, 0), time.monotonic()
                what = Contribution(
                    key, LENGTH, values_of(me), compressor("none", GEOMETRY), "gather", WEIGHTS
                )
                exchange(ballot, me, what, LinkSlot(turns, 0), times)
                took.append(time.monotonic() - start)
            return took

        return go

    with shared_store() as store:
        return run_each({me: site(me, store) for me in WEIGHTS}, limit=60.0)


def test_who_lets_every_piece_wait_is_named_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = course(monkeypatch, [0.0, 0.0, PAUSE], USUAL)
    for site in ("paris", "lyon"):
        assert "broken by oslo" in str(results[site]), results


def test_a_slow_link_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the time-out each time, and no piece does."""
    results = course(monkeypatch, [PAUSE, PAUSE])
    assert all(seconds > SILENCE for seconds in results["paris"]), results
    assert all(isinstance(results[site], list) for site in WEIGHTS), results


class _Group:
    """Transfers that end when they are told to, and for which time goes by."""

    def __init__(self, moves: bool) -> None:
        self.moves, self.given_up, self.now = moves, 0, 0.0

    def receive(self, buffer: torch.Tensor, site: str, tag: int) -> Any:
        def give_up() -> None:
            self.given_up += 1

        def wait(_: float) -> None:
            self.now += 0.05

        made = transfer(buffer.numel(), site=site)
        made.__dict__.update(moves=self.moves, wait=wait, poll=lambda: False, give_up=give_up)
        return made


@pytest.mark.parametrize(("moves", "told"), [(True, [["b"]]), (False, [])])
def test_what_hangs_is_told_when_another_was_the_first_to_say_so(
    monkeypatch: pytest.MonkeyPatch, moves: bool, told: list[list[str]]
) -> None:
    """A peer that has not begun may have waited for somebody itself."""
    said: list[list[str]] = []
    there = _Group(moves)
    monkeypatch.setattr(attempts, "time", SimpleNamespace(monotonic=lambda: there.now))
    members = [ExchangeMember(site=s, incarnation=1, role="member") for s in "ab"]

    def report(key: ExchangeKey, attempt: int, failed: Sequence[str]) -> None:
        said.append(list(failed))

    ballot = SimpleNamespace(
        epoch=lambda: 1 + (there.now > 0.3),
        attempt=lambda key: 2,
        report_broken=report,
        group=lambda begun, superseded: there,
    )
    what = Contribution(
        ExchangeKey.outer(0, 0, 0), LENGTH, None, compressor("none", GEOMETRY), "gather", WEIGHTS
    )
    begun = BeginReply(epoch=1, attempt=1, members=members, decided=False)
    times = LinkTimes(0.4)
    times.note(transfer(LENGTH * 4, 0.01))
    attempt = Attempt(cast(Any, ballot), "a", what, begun, LinkSlot(OrderedLock(), 0), times)
    part = cast(Any, what.compressor).part(0, LENGTH, 0)
    with pytest.raises(RepeatError, match="members changed"):
        attempt.swap({}, {"b": part}, 1)
    assert said == told
