"""A site that keeps the others waiting is left out and enters again, with nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.arrivals import Arrivals
from dilocox.coordinator.server.refusals import Caller
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

SLOW = m.Measured(step_us=500_000, exchange_bytes=1, exchange_us=1, exchanges=1)
ROUND = 4 * 0.5
"""Seconds of a round of four such steps."""
KEY = m.ExchangeKey.outer(1, 0, 0)


class Two(Driver):
    """Two sites through round 0; then a is at an exchange of round 1, and b is not."""

    def __init__(self, folder: Path, sites: str = "ab", shards: int = 1, **sections: object):
        super().__init__(folder, run_config(sites, shards=shards, **sections))
        self.start()
        for round_ in (0, 1, 2):
            self.plan(round_, "a")
        for site in sites:
            self.round_done(site, 0, SLOW)

    @property
    def allowed(self) -> float:
        return self.core.timeouts.grace + ROUND

    def wait(self, seconds: float) -> str:
        """Role of b after so long."""
        self.clock.time += seconds
        for site in self.config.sites:
            for rank in self.ranks(site):
                self.core.beat(m.BeatRequest(rank=rank, tick=0, round=1, slot=0))
        self.core.expire()
        return self.core.state.sites["b"].role


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.core.close()


def test_the_grace_is_a_quarter_of_the_link_timeout(two: Two) -> None:
    assert two.core.timeouts.grace == 30.0 / 4


def test_two_sites_go_on_as_one_after_the_grace_and_a_round(two: Two) -> None:
    begun = two.begin(KEY, "a")
    assert wait_parts(two, two.allowed) == "active"
    assert two.wait(0.2) == "entering"
    again = two.begin(KEY, "a")
    assert (again.attempt, [member.site for member in again.members]) == (begun.attempt + 1, ["a"])
    reply = two.vote(KEY, "a", again.attempt, held=["a"])
    assert (reply.decision, reply.set) == ("commit", ["a"])
    # b, which comes now, is in no attempt: it keeps what it has.
    assert [member.site for member in two.begin(KEY, "b").members] == ["a"]
    assert two.vote(KEY, "b", begun.attempt, held=["a", "b"]).decision == "repeat"
    said = "b is left behind: the others waited 10 s for it at outer/1/0/0; it enters again from a"
    assert said in [text for *_, text in two.core.state.feed]


def wait_parts(two: Two, seconds: float) -> str:
    """As `wait`, in parts in which nobody counts as held up."""
    for _ in range(20):
        role = two.wait(0.99 * seconds / 20)
    return role


def test_it_ends_its_round_gives_back_the_rest_and_counts_again(two: Two) -> None:
    two.begin(KEY, "a")
    wait_parts(two, two.allowed)
    two.wait(0.2)
    state = two.core.state
    # What it is through with is committed although the others have gone on without it.
    two.round_done("b", 1, SLOW)
    two.write_checkpoint("b", 4, 1, 0)
    assert state.checkpoints == {}
    asked = two.core.plan(2, Caller("b", 1))
    assert asked.plan is not None
    assert asked.receive
    assert "b" in asked.plan.members
    assert not two.core.plan(2, Caller("a", 1)).receive
    two.round_done("a", 1, SLOW)
    two.ready("b")
    assert (state.sites["b"].role, state.sites["b"].active_from) == ("active", 3)
    states = {(x.round, x.state) for x in state.ledger.entries if x.site == "b"}
    assert states == {(0, "committed"), (1, "committed"), (2, "returned")}
    plan = two.plan(3, "a")
    assert plan is not None
    assert list(plan.members) == ["a", "b"]
    # Its ranges of round 2 are in somebody's hands again.
    given = [r for member in plan.members.values() for r in member.ranges]
    assert (48 - 16 + 48, 16) in given
    assert replayed(two) == state


def test_who_has_not_trained_a_round_is_waited_for(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("ab"))
    driver.start()
    driver.plan(0, "a")
    key = m.ExchangeKey.outer(0, 0, 0)
    driver.begin(key, "a")
    for _ in range(30):
        driver.clock.time += 4.0
        for site in "ab":
            driver.beat(site)
        driver.core.expire()
    assert driver.core.state.sites["b"].role == "active"
    driver.core.close()


@pytest.mark.parametrize(
    "sections", [{"outer": {"min_sites": 2}}, {"outer": {"method": "allreduce"}}]
)
def test_where_the_others_cannot_go_on_they_wait(
    tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    two = Two(tmp_path, **sections)
    key = KEY if "min_sites" in sections["outer"] else m.ExchangeKey.gradient(1, 0, 0)
    two.begin(key, "a")
    assert wait_parts(two, 3 * two.allowed) == "active"
    two.core.close()


def test_a_late_shard_is_a_late_site(tmp_path: Path) -> None:
    two = Two(tmp_path, shards=2)
    two.begin(KEY, "a")
    two.begin(KEY, "b")
    two.begin(KEY, "b", shard=1)
    # a itself is not whole: only b is, so a is what is waited for.
    wait_parts(two, two.allowed)
    two.wait(0.2)
    assert {name: site.role for name, site in two.core.state.sites.items()} == {
        "a": "entering", "b": "active",
    }  # fmt: skip
    two.core.close()


@pytest.mark.parametrize("dies", [False, True])
def test_who_is_overtaken_in_the_flush_is_not_among_those_that_end_the_run(
    tmp_path: Path, dies: bool
) -> None:
    """It enters again in a round that never comes; the run is finished only by one that flushed."""
    two = Two(tmp_path, outer={"rounds": 2, "inner_steps": 4, "fragments": 1})
    for site in "ab":
        two.round_done(site, 1, SLOW)
    flush, state = m.ExchangeKey.outer(2, 0, 0), two.core.state
    assert state.plans[2].kind == "flush"
    begun = two.begin(flush, "a")
    wait_parts(two, two.allowed)
    assert two.wait(0.2) == "entering"
    again = two.begin(flush, "a")
    assert two.vote(flush, "a", begun.attempt + 1, held=["a"]).set == ["a"]
    assert [member.site for member in again.members] == ["a"]
    assert [member.site for member in two.begin(flush, "b").members] == ["a"]
    if dies:
        two.leave("a", failed=True)
        assert (state.phase, state.sites["b"].role) == ("failed", "entering")
    else:
        two.leave("b", failed=True)
        two.finish("a")
        assert (state.phase, state.sites["b"].role) == ("finished", "gone")
    two.core.close()


def test_a_coordinator_that_slept_blames_nobody() -> None:
    arrivals = Arrivals()
    arrivals.look(9.0, 2.5)
    arrivals.note("k", "a", 0, 10.0)
    arrivals.look(11.0, 2.5)
    voters = [("a", 0, 0), ("b", 0, 0)]
    assert arrivals.awaited("k", voters) == (10.0, ["b"])
    arrivals.look(71.0, 2.5)
    assert arrivals.awaited("k", voters) == (70.0, ["b"])


def test_arrivals_by_hand() -> None:
    arrivals = Arrivals()
    voters = [("a", 0, 0), ("a", 0, 1), ("b", 0, 0), ("b", 0, 1)]
    assert arrivals.awaited("k", voters) is None
    arrivals.note("k", "a", 0, 10.0)
    assert arrivals.awaited("k", voters) is None
    arrivals.note("k", "a", 1, 12.0)
    arrivals.note("k", "a", 1, 99.0)
    assert arrivals.awaited("k", voters) == (12.0, ["b"])
    arrivals.note("k", "b", 0, 13.0)
    arrivals.note("k", "b", 1, 15.5)
    assert arrivals.awaited("k", voters) is None
    assert arrivals.late("k") == {"a": 0.0, "b": 3.5}
    arrivals.forget("b")
    assert arrivals.late("k") == {"a": 0.0}
    arrivals.keep([])
    assert arrivals.late("k") == {}
