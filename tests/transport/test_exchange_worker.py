"""The exchanges of a rank: payloads one after the other, all else beside them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.compression import compressor
from dilocox.coordinator.protocol.messages import BeginReply, ExchangeKey, VoteReply
from dilocox.coordinator.protocol.verdicts import RankVote
from dilocox.errors import ExchangeError
from dilocox.outer.contribution import Contribution
from dilocox.transport.exchange_worker import ExchangeWorker, LinkSlot, OrderedLock
from tests.support.exchanging import GEOMETRY, LENGTH, WEIGHTS, SharedBallot, values_of
from tests.support.thread_sites import MemoryStore, run_each, shared_store

pytestmark = pytest.mark.waits

KEYS = [ExchangeKey.outer(0, 0, fragment) for fragment in range(4)]
LIMIT = 60.0


def contribution(key: ExchangeKey, me: str, mode: str = "gather") -> Contribution:
    return Contribution(
        key, LENGTH, values_of(me), compressor("none", GEOMETRY), mode, dict.fromkeys(WEIGHTS, 1.0)
    )


@dataclass
class Later(SharedBallot):
    """A ballot per exchange, whose decision on one waits for the vote on the next."""

    voted: dict[str, threading.Event] = field(default_factory=dict)

    def vote(self, key: ExchangeKey, attempt: int, vote: RankVote) -> VoteReply:
        """Every second exchange is decided only when its payloads and the next one's are here."""
        self.voted.setdefault(key.text, threading.Event()).set()
        if key.fragment % 2 == 0:
            following = self.voted.setdefault(KEYS[key.fragment + 1].text, threading.Event())
            assert following.wait(LIMIT), "the next exchange did not go on beside this one"
        return VoteReply(
            decision="commit", set=list(self.members), attempt=1, epoch=1, waiting_for=[]
        )


def test_an_exchange_is_decided_while_the_next_one_travels() -> None:
    def site(me: str, store: MemoryStore) -> Callable[[], Any]:
        def go() -> Any:
            worker = ExchangeWorker(Later(store, me), me)
            futures = [worker.submit(contribution(key, me)) for key in KEYS]
            outcomes = [future.result(LIMIT) for future in futures]
            worker.close()
            return [
                (outcome.contributors, float(torch.linalg.vector_norm(outcome.average)))
                for outcome in outcomes
                if outcome.average is not None
            ]

        return go

    with shared_store() as store:
        results = run_each({me: site(me, store) for me in WEIGHTS}, limit=60.0)
    assert len(results["paris"]) == len(KEYS), results
    assert results["paris"] == results["lyon"] == results["oslo"]
    assert results["paris"][0][0] == tuple(WEIGHTS)


@dataclass
class Alone(SharedBallot):
    """A site alone, whose every step is written down; some exchanges cannot be decided."""

    broken: str = ""
    steps: list[str] = field(default_factory=list)
    encoded: threading.Event = field(default_factory=threading.Event)

    def begin(self, key: ExchangeKey, commitment: str | None = None) -> BeginReply:
        self.steps.append(f"begin {key.fragment}")
        return super().begin(key, commitment)

    def vote(self, key: ExchangeKey, *_: Any, **__: Any) -> VoteReply:
        self.steps.append(f"vote {key.fragment}")
        if key.text == self.broken:
            raise ExchangeError(f"no decision on {key.text}")
        return VoteReply(decision="commit", set=[self.me], attempt=1, epoch=1, waiting_for=[])


def test_after_an_exchange_that_failed_all_fail_with_its_error() -> None:
    ballot = Alone(MemoryStore({}), "paris", members=["paris"], broken=KEYS[1].text)
    worker = ExchangeWorker(ballot, "paris")
    # Those beside it may be through before it has failed; nothing is begun afterwards.
    futures = [worker.submit(contribution(key, "paris")) for key in KEYS[:2]]
    assert futures[0].result(LIMIT).contributors == ("paris",)
    assert str(futures[1].exception(LIMIT)) == f"no decision on {KEYS[1].text}"
    after = [worker.submit(contribution(key, "paris")) for key in KEYS[2:]]
    errors = [str(future.exception(LIMIT)) for future in after]
    assert set(errors) == {f"no decision on {KEYS[1].text}"}
    assert not {"begin 2", "begin 3"} & set(ballot.steps)
    worker.close()
    late = worker.submit(contribution(KEYS[0], "paris"))
    assert not late.done()


def test_threads_that_wait_keep_no_tensors() -> None:
    ballot = Alone(MemoryStore({}), "paris", members=["paris"])
    worker = ExchangeWorker(ballot, "paris")
    given = [contribution(key, "paris") for key in KEYS[:2]]
    freed = [threading.Event() for _ in given]
    for each, event in zip(given, freed, strict=True):
        weakref.finalize(each.values, event.set)
    futures = [worker.submit(each) for each in given]
    assert all(future.result(LIMIT).average is not None for future in futures)
    del given, each, futures
    assert all(event.wait(LIMIT) for event in freed)
    worker.close()


def test_every_thread_prepares_itself() -> None:
    prepared: list[str] = []
    ballot = Alone(MemoryStore({}), "paris", members=["paris"])
    worker = ExchangeWorker(
        ballot, "paris", lambda: prepared.append(threading.current_thread().name)
    )
    worker.close()
    assert prepared == ["exchange"] * 2


@dataclass
class SlowLink(Alone):
    """The first exchange holds the link for seconds of a clock that nothing else moves."""

    now: float = 0.0
    waited_for: threading.Event = field(default_factory=threading.Event)
    """The second exchange has come for the link."""

    def group(self, begun: BeginReply, superseded: Callable[[], bool]) -> Any:
        if not self.now:
            assert self.waited_for.wait(LIMIT)
            self.now = 300.0
        return super().group(begun, superseded)


def test_the_time_of_an_exchange_does_not_hold_the_wait_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ballot = SlowLink(MemoryStore({}), "paris", members=["paris"])
    clock = SimpleNamespace(monotonic=lambda: ballot.now, thread_time=time.thread_time)
    wait_for = OrderedLock.wait_for

    def watched(turns: OrderedLock, number: int) -> None:
        if number == 1:
            ballot.waited_for.set()
        wait_for(turns, number)

    monkeypatch.setattr("dilocox.transport.exchange.time", clock)
    monkeypatch.setattr("dilocox.transport.exchange_worker.time", clock)
    monkeypatch.setattr(OrderedLock, "wait_for", watched)
    worker = ExchangeWorker(ballot, "paris")
    futures = [worker.submit(contribution(key, "paris")) for key in KEYS[:2]]
    assert [future.result(LIMIT).seconds for future in futures] == [300.0, 0.0]
    worker.close()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]])
def test_turns_come_in_order_whoever_is_first_to_be_through(order: list[int]) -> None:
    turns = OrderedLock()
    taken: list[int] = []
    mine = [LinkSlot(turns, number) for number in range(4)]
    last = threading.Thread(target=lambda: (mine[3].take(), taken.append(3)))
    last.start()
    for count, number in enumerate(order):
        assert taken == [], f"after {count} of three"
        mine[number].pass_on()
        mine[number].pass_on()
    last.join(LIMIT)
    assert taken == [3]
    mine[0].take()


def test_who_waits_for_a_turn_learns_of_a_failure() -> None:
    turns = OrderedLock()
    turns.fail(ExchangeError("first"))
    turns.fail(ExchangeError("second"))
    with pytest.raises(ExchangeError, match="first"):
        LinkSlot(turns, 5).take()
