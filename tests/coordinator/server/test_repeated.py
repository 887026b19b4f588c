"""A call whose answer did not come is made again: the same call twice is one call."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from tests.support.coordinator_driver import Driver, run_config

pytestmark = pytest.mark.waits

KEY = m.ExchangeKey.outer(0, 0, 0)


class Commitments:
    """A notary that knows who has committed, and writes nothing."""

    run, manifest, resumes = "run", "", 0

    def __init__(self) -> None:
        self.there: dict[tuple[str, int], str] = {}
        self.signed: dict[tuple[str, int], str] = {}
        self.written = 0

    def committed(self, rank: m.RankId, key: m.ExchangeKey, statement: str, *, bound: bool) -> bool:
        news = (rank.site, rank.shard) not in self.there
        self.written += news
        return self.there.setdefault((rank.site, rank.shard), statement) is statement and news

    def commitments(self, key: m.ExchangeKey) -> Collection[tuple[str, int]]:
        return self.there.keys()

    def contribution(
        self, rank: m.RankId, key: m.ExchangeKey, attempt: int, digest: str, *said: Any, **how: Any
    ) -> bool:
        self.signed[rank.site, rank.shard] = digest
        return True

    def contributions(self, key: m.ExchangeKey, attempt: int) -> dict[tuple[str, int], str]:
        return self.signed

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@pytest.fixture(params=[False, True], ids=["unrecorded", "recorded"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    options = {"notary": Commitments()} if request.param else {}
    made = Driver(tmp_path, run_config("abc"), **options)
    made.start()
    made.plan(0, "a")
    yield made
    made.core.close()


def length(driver: Driver) -> int:
    return len(list(driver.core.log.events()))


def begin(driver: Driver, site: str) -> m.BeginReply:
    return driver.begin(KEY, site, commitment=f"of {site}")


def vote(driver: Driver, site: str, **fields: Any) -> m.VoteReply:
    said = {"held": list("abc"), "digests": {site: site * 64}, "statement": "signed"}
    return driver.vote(KEY, site, **{**said, **fields})


def test_a_site_that_begins_again_and_again_has_begun_once(driver: Driver) -> None:
    """As the fast site does, for as long as the slow one takes."""
    first, events, woken = begin(driver, "a"), length(driver), list[str]()
    driver.core.on_change = woken.append
    for _ in range(3):
        driver.clock.time += 500.0
        assert begin(driver, "a") == first
    assert (length(driver), woken) == (events, [])
    begin(driver, "b")
    driver.clock.time += 100.0
    last = begin(driver, "c")
    assert (last.waiting_for, last.attempt) == ([], 1)
    # It is not late because it has asked again, nor the others early.
    assert driver.core.arrivals.late(KEY.text) == {"a": 0.0, "b": 1500.0, "c": 1600.0}
    assert begin(driver, "a") == last
    notary = driver.options.get("notary")
    assert notary is None or notary.written == 3


def test_a_vote_that_is_repeated_counts_once_and_is_answered_the_same(driver: Driver) -> None:
    for site in "abc":
        begin(driver, site)
    waits = vote(driver, "a")
    events = length(driver)
    assert vote(driver, "a") == waits
    # What it says the second time is no other vote.
    assert vote(driver, "a", held=["a"], contributes=False) == waits
    assert length(driver) == events
    driver.reopen()
    assert vote(driver, "a") == waits
    vote(driver, "b")
    decided = vote(driver, "c")
    events = length(driver)
    for site in "abc":
        again = vote(driver, site)
        assert (again.decision, again.set) == ("commit", decided.set) == ("commit", list("abc"))
    assert begin(driver, "a").decided
    assert length(driver) == events


def test_a_broken_attempt_that_is_told_twice_broke_once(driver: Driver) -> None:
    for site in "abc":
        begin(driver, site)
    told = driver.vote(KEY, "b", broken=True, failed=["c"])
    events = length(driver)
    assert driver.vote(KEY, "b", broken=True, failed=["c"]) == told
    driver.reopen()
    assert driver.vote(KEY, "b", broken=True, failed=["c"]) == told
    assert (length(driver), told.decision, told.attempt) == (events, "repeat", 2)


def test_an_average_that_is_told_twice_is_one(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("ab", outer={"exchange": "reduce"}))
    driver.start()
    driver.plan(0, "a")
    begin(driver, "a")
    for site in "ab":
        driver.vote(KEY, site, held=list("ab"))
    waits = driver.vote(KEY, "a", phase="done")
    events = length(driver)
    assert driver.vote(KEY, "a", phase="done") == waits
    assert driver.vote(KEY, "b", held=list("ab")).decision == "average"
    assert length(driver) == events
    assert driver.vote(KEY, "b", phase="done").decision == "commit"
    assert driver.vote(KEY, "a", phase="done").decision == "commit"
    driver.core.close()
