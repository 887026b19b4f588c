"""What must hold whatever happens in whatever order."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.coordinator.server.events import Decided, Event, Resumed
from dilocox.coordinator.server.exchange_votes import Exchange, Vote
from dilocox.coordinator.server.ledger import Ledger
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.state import CoordinatorState
from tests.support.coordinator_driver import Driver, run_config

pytestmark = pytest.mark.waits

SITES = "abc"
DIGESTS = {name: name * 64 for name in SITES}
KEYS = [m.ExchangeKey.outer(round_, 0, fragment) for round_ in range(3) for fragment in (0, 1)]
site = st.sampled_from(SITES)
key = st.sampled_from(KEYS)
held = st.lists(site, unique=True, max_size=3)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["join", "ready", "leave", "silence", "finish"]), site),
        st.tuples(st.sampled_from(["retire", "depart", "spoiled"]), site),
        st.tuples(st.just("plan"), site, st.integers(0, 4)),
        st.tuples(st.just("done"), site, st.integers(0, 3)),
        st.tuples(st.just("begin"), site, key),
        st.tuples(st.just("vote"), site, key, st.integers(0, 1), held, st.booleans()),
        st.tuples(st.just("fetched"), site, key, st.integers(0, 1), held),
        st.tuples(st.just("average"), site, key, st.integers(0, 1)),
        st.tuples(st.just("broken"), site, key, st.integers(0, 1), held),
        st.tuples(st.just("write"), site, st.integers(0, 4)),
        st.tuples(st.sampled_from(["restart", "resume"])),
    ),
    max_size=60,
)


class Watched(Driver):
    """A driver that takes random steps and checks after each."""

    def __init__(self, folder: Path, exchange: str) -> None:
        super().__init__(folder, run_config(SITES, shards=2, outer={"exchange": exchange}))
        self.epochs: dict[int, tuple[Any, ...]] = {}
        self.decisions: dict[tuple[int, str], list[str]] = {}
        self.course = 0
        self.owned: dict[int, list[tuple[str, int, int]]] = {}

    def step(self, name: str, *args: Any) -> None:
        if name != "join" and args and args[0] not in self.incarnations:
            return
        with contextlib.suppress(Refused):
            getattr(self, f"do_{name}")(*args)
        self.check_state()

    def do_join(self, site: str) -> None:
        self.enrol(site)
        self.beat(site)

    def do_ready(self, site: str) -> None:
        self.ready(site)

    def do_leave(self, site: str) -> None:
        self.leave(site)

    def do_retire(self, site: str) -> None:
        self.core.departures.retire(m.RetireRequest(site=site, reason="any"), Caller("operator", 0))

    def do_depart(self, site: str) -> None:
        for rank in self.ranks(site):
            self.core.departures.depart(m.DepartRequest(rank=self.check(rank)))

    def do_spoiled(self, site: str) -> None:
        ticks = [t for t, item in self.core.state.checkpoints.items() if item.sites is not None]
        if ticks and self.core.state.phase == "starting":
            rank = self.check(self.ranks(site)[0])
            request = m.SpoiledRequest(rank=rank, tick=max(ticks), reason="changed")
            resumes = self.core.state.resumes
            self.core.saves.spoiled(request)
            self.course += self.core.state.resumes - resumes

    def do_finish(self, site: str) -> None:
        self.finish(site)

    def do_silence(self, site: str) -> None:
        for _ in range(4):
            self.clock.time += 2
            for other in self.core.state.live:
                if other != site:
                    self.beat(other, self.core.state.lease)
            self.core.expire()

    def do_plan(self, site: str, round_: int) -> None:
        self.plan(round_, site)

    def do_done(self, site: str, round_: int) -> None:
        self.round_done(site, round_)

    def do_begin(self, site: str, key: m.ExchangeKey) -> None:
        self.begin(key, site)

    def do_vote(
        self, site: str, key: m.ExchangeKey, shard: int, held: list[str], says: bool
    ) -> None:
        attempt = self.begin(key, site, shard).attempt
        digests = {site: DIGESTS[site]} if says else {}
        opinions = {name: RankOpinion(digest=DIGESTS[name]) for name in held}
        self.vote(
            key, site, attempt, shard, held=held, contributes=says, digests=digests,
            opinions=opinions,
        )  # fmt: skip

    def do_fetched(self, site: str, key: m.ExchangeKey, shard: int, held: list[str]) -> None:
        attempt = self.begin(key, site, shard).attempt
        self.vote(key, site, attempt, shard, phase="fetched", held=held)

    def do_average(self, site: str, key: m.ExchangeKey, shard: int) -> None:
        attempt = self.begin(key, site, shard).attempt
        self.vote(key, site, attempt, shard, phase="done")

    def do_broken(self, site: str, key: m.ExchangeKey, shard: int, failed: list[str]) -> None:
        attempt = self.begin(key, site, shard).attempt
        self.vote(key, site, attempt, shard, broken=True, failed=failed)

    def do_write(self, site: str, round_: int) -> None:
        self.write_checkpoint(site, round_ * 4 + 2, round_, 2)

    def do_restart(self) -> None:
        before = self.core.state
        self.reopen()
        assert self.core.state == before

    def do_resume(self) -> None:
        checkpoints = self.core.state.checkpoints.values()
        if any(item.sites is not None for item in checkpoints):
            self.core.resume()
            self.course += 1

    def check_state(self) -> None:
        state = self.core.state
        members = tuple(state.members)
        if state.members:
            assert self.epochs.setdefault(state.epoch, members) == members, "an epoch came twice"
            assert state.epoch == max(self.epochs)
            if not state.over:
                live = {(name, state.sites[name].incarnation) for name in state.live}
                finished = set(state.with_role("finished"))
                assert {item for item in members if item[0] not in finished} <= live
        for text, exchange in state.exchanges.items():
            if exchange.decision is not None:
                known = self.decisions.setdefault((self.course, text), exchange.decision)
                assert known == exchange.decision, "a decision changed"
        check_ledger(state.ledger)


def check_ledger(ledger: Ledger) -> None:
    """Every number below the counter is held once, or free once."""
    for space, end in ledger.next.items():
        held = [
            (entry.start, entry.count)
            for entry in ledger.entries
            if entry.space == space and entry.state != "returned"
        ]
        position = 0
        for start, count in sorted(held + ledger.pool.get(space, [])):
            assert start == position, "a number is held twice, or by nobody"
            position = start + count
        assert position == end


def run_in(moves: list[tuple[Any, ...]], exchange: str, begun: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        driver = Watched(Path(folder), exchange)
        if begun:
            driver.start()
            driver.plan(0, "a")
            driver.check_state()
        for name, *args in moves:
            driver.step(name, *args)
        state = CoordinatorState(driver.config)
        for event in driver.core.log.events():
            if isinstance(event, Decided):
                check_set(state, event)
            state.apply(event)
        assert state == driver.core.state, "replay differs from what was lived through"
        driver.core.close()


def check_set(state: CoordinatorState, event: Event) -> None:
    """A set holds live members of the round's plan only, in run file order."""
    assert isinstance(event, Decided)
    exchange = state.exchanges[event.key]
    voting = {name for name, _, _ in state.voters(exchange)}
    assert set(event.set) <= voting <= set(state.live)
    assert set(event.set) <= set(state.plans[exchange.round].members)
    assert event.set == sorted(event.set)
    assert exchange.decision is None


SLOW = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SLOW
@given(steps, st.sampled_from(["gather", "reduce"]), st.booleans())
def test_whatever_happens(moves: list[tuple[Any, ...]], exchange: str, begun: bool) -> None:
    run_in(moves, exchange, begun)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_ledger_never_gives_a_number_twice(data: st.DataObject) -> None:
    ledger, round_ = Ledger(), 0
    for _ in range(data.draw(st.integers(1, 30))):
        who = data.draw(site)
        if data.draw(st.booleans()):
            needed = data.draw(st.integers(1, 50))
            spare = list(ledger.pool.get("shared", []))
            ranges = ledger.allocate("shared", needed, 0, spare)
            assert sum(count for _, count in ranges) == needed
            ledger.issue(who, 1, round_, "shared", ranges)
            round_ += 1
        elif data.draw(st.booleans()):
            ledger.commit(who, 1, data.draw(st.integers(0, round_)))
        else:
            ledger.give_back(who, 1)
        check_ledger(ledger)
        assert Ledger.from_json(ledger.to_json()) == ledger


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.tuples(site, st.integers(0, 1)), st.tuples(held, st.booleans())))
def test_set_is_what_every_voter_holds(votes: dict[tuple[str, int], Any]) -> None:
    exchange = Exchange("outer/0/0/0", 0, 0, 1, [])
    voters = [(name, 0, shard) for name, shard in votes]
    for (name, shard), (holds, says) in votes.items():
        exchange.votes[name, 0, shard] = Vote(holds, says)
    chosen = exchange.contribution_set(voters, list(SITES))
    for name in SITES:
        there = any(voter == name for voter, _ in votes)
        whole = all(name in holds for holds, _ in votes.values())
        willing = all(says for (voter, _), (_, says) in votes.items() if voter == name)
        assert (name in chosen) == (there and whole and willing)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**9 - 1), st.integers(0, 999), st.integers(0, 99), st.integers(0, 99))
def test_key_text(round_: int, step: int, stage: int, fragment: int) -> None:
    for made in (
        m.ExchangeKey.outer(round_, stage, fragment),
        m.ExchangeKey.gradient(round_, step, stage, fragment),
    ):
        assert m.ExchangeKey.parse(made.text) == made
        m.BeginRequest(key=made.text, rank=m.RankId(site="a", stage=stage, shard=0))


def test_every_event_survives_json() -> None:
    event = Resumed(1.5, 6, 1, 2, [{"round": 1}], Ledger().to_json())
    assert Event.decode("Resumed", json.loads(json.dumps(event.to_json()))) == event
