"""Who hangs in an exchange is set aside; who waits there for another is not blamed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

FIRST, SECOND = m.ExchangeKey.outer(0, 0, 0), m.ExchangeKey.outer(0, 0, 1)
SITES = "abcm"


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path, run_config(SITES))
    made.start()
    made.plan(0, "a")
    yield made
    assert replayed(made) == made.core.state
    made.core.close()


def begin(driver: Driver, key: m.ExchangeKey) -> int:
    return max(driver.begin(key, site).attempt for site in SITES)


def vote(driver: Driver, key: m.ExchangeKey, sites: str) -> None:
    attempt = driver.core.state.exchanges[key.text].attempt
    for site in sites:
        driver.vote(key, site, attempt, held=list(SITES))


def wait(driver: Driver, seconds: float) -> dict[str, str]:
    """Roles after so long, in which all sites beat."""
    for _ in range(math.ceil(seconds)):
        driver.clock.time += seconds / math.ceil(seconds)
        for site in driver.core.state.live:
            driver.beat(site)
        driver.core.expire()
    return {name: site.role for name, site in driver.core.state.sites.items()}


def test_who_never_votes_is_left_behind(four: Driver) -> None:
    limits = four.core.timeouts
    begin(four, FIRST)
    vote(four, FIRST, SITES)
    begin(four, SECOND)
    wait(four, 3.0)
    vote(four, SECOND, "abc")
    # When it began is known by a look at it, every second here.
    assert wait(four, limits.stall + 10 * 2.0 - 1.0)["m"] == "active"
    assert wait(four, 3.0) == {"a": "active", "b": "active", "c": "active", "m": "entering"}
    told = [text for *_, text in four.core.state.feed if "left behind" in text]
    assert told == ["m is left behind: the others waited 176 s for its vote on outer/0/0/1"]
    assert four.core.state.exchanges[SECOND.text].attempt == 2


def test_a_site_that_was_slow_before_has_longer(four: Driver) -> None:
    """Also in the first exchange, of which nothing is known."""
    limits = four.core.timeouts
    begin(four, FIRST)
    vote(four, FIRST, "abc")
    assert wait(four, limits.stall + 60.0)["m"] == "active"
    vote(four, FIRST, "m")
    begin(four, SECOND)
    vote(four, SECOND, "abc")
    assert wait(four, 5 * limits.stall)["m"] == "active"


def test_a_minority_sets_nobody_aside(four: Driver) -> None:
    begin(four, FIRST)
    vote(four, FIRST, "m")
    assert wait(four, four.core.timeouts.rejoin + 60.0) == dict.fromkeys(SITES, "active")


def test_who_is_held_up_in_an_earlier_exchange_is_not_blamed_in_the_next(four: Driver) -> None:
    """m sends to b as slowly as it may: the others are through, and wait for b in the next one."""
    begin(four, FIRST)
    vote(four, FIRST, "acm")
    for attempt in range(1, 8):
        assert begin(four, SECOND) == attempt
        for site in "acm":
            four.vote(SECOND, site, attempt, broken=True, failed=["b"])
    assert four.core.state.live == list(SITES)
    assert four.core.state.running
    assert four.core.state.disputes(0) == {site: [] for site in SITES}
    # b names whom it waits for, and the next attempt of that exchange is its own.
    four.vote(FIRST, "b", 1, broken=True, failed=["m"])
    vote(four, FIRST, SITES)
    # Nobody is held up any more: the next one's reports count.
    for attempt in (8, 9):
        assert begin(four, SECOND) == attempt
        for site in "acm":
            four.vote(SECOND, site, attempt, broken=True, failed=["b"])
    assert four.core.state.sites["b"].reason == "unreachable"
