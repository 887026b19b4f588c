"""Who goes where sites say of each other that their link is broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits


def key(round_: int) -> m.ExchangeKey:
    return m.ExchangeKey.outer(round_, 0, 0)


def started(folder: Path, sites: str) -> Driver:
    driver = Driver(folder, run_config(sites, outer={"rounds": 80}))
    driver.start()
    driver.plan(0, sites[0])
    driver.begin(key(0), sites[0])
    return driver


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Driver]:
    made = started(tmp_path, "amyz")
    yield made
    assert replayed(made) == made.core.state
    made.core.close()


def blame(driver: Driver, round_: int, *links: tuple[str, str]) -> None:
    """(reporter, named), as often as it takes until somebody goes."""
    live = list(driver.core.state.live)
    for attempt in range(1, 5):
        for reporter, named in links:
            if driver.core.state.live == live:
                driver.vote(key(round_), reporter, attempt, broken=True, failed=list(named))


def why(driver: Driver, site: str) -> str:
    assert site not in driver.core.state.live
    return driver.core.state.sites[site].reason


def test_four_false_reports_of_one_member_put_itself_out(four: Driver) -> None:
    blame(four, 0, ("m", "z"))
    assert four.core.state.live == ["a", "y", "z"]
    assert why(four, "m") == "unreachable: it alone says that it has no link to z"


def test_who_is_named_by_two_of_three_goes(four: Driver) -> None:
    blame(four, 0, ("y", "a"), ("z", "a"))
    assert four.core.state.live == ["m", "y", "z"]
    assert "broken links with more sites than any other" in why(four, "a")


def test_who_names_two_others_goes_itself(four: Driver) -> None:
    blame(four, 0, ("a", "yz"), ("y", "a"))
    assert four.core.state.live == ["m", "y", "z"]


def test_where_both_say_so_the_last_in_the_run_file_goes(four: Driver) -> None:
    blame(four, 0, ("m", "z"), ("z", "m"))
    assert four.core.state.live == ["a", "m", "y"]
    assert "by its own word and that of m they have no link to each other" in why(four, "z")


def forward(driver: Driver, round_: int) -> None:
    """All live sites through the round before `round_`, and its first exchange begun."""
    for left in list(driver.core.state.undecided):
        exchange = driver.core.state.exchanges[left]
        for site in dict.fromkeys(site for site, *_ in driver.core.state.voters(exchange)):
            old = m.ExchangeKey.parse(left)
            driver.vote(old, site, exchange.attempt, held=[name for name, _ in exchange.members])
    for before in range(driver.core.state.next_round - 1, round_):
        for site in driver.core.state.live:
            driver.round_done(site, before)
        driver.plan(before + 1, driver.core.state.live[0])
    driver.begin(key(round_), driver.core.state.live[0])


@pytest.mark.parametrize(("again", "out"), [(1, "m"), (70, "y")])
def test_who_makes_a_second_site_report_it_goes(four: Driver, again: int, out: str) -> None:
    """m sends nothing to z, which says so and goes; then it does the same to y. After many rounds
    nobody holds that against m."""
    blame(four, 0, ("z", "m"))
    assert "it alone says that it has no link to m" in why(four, "z")
    four.join("z")
    forward(four, again)
    assert set(four.core.state.live) == set("amyz")
    blame(four, again, ("y", "m"))
    assert out not in four.core.state.live
    assert len(four.core.state.live) == 3


def test_a_site_that_died_is_no_dispute_of_those_it_left(four: Driver) -> None:
    """z dies, and y was the first to notice: no reason to doubt y later."""
    four.vote(key(0), "y", 1, broken=True, failed=["z"])
    four.leave("z", "killed", failed=True)
    attempt = four.begin(key(0), "a").attempt
    for _ in range(4):
        four.vote(key(0), "m", attempt, broken=True, failed=["y"])
        attempt += 1
    assert four.core.state.live == ["a", "y"]


@pytest.mark.parametrize("reporter", "ab")
def test_of_two_sites_it_is_said_whose_word_it_is(tmp_path: Path, reporter: str) -> None:
    two = started(tmp_path, "ab")
    other = "b" if reporter == "a" else "a"
    blame(two, 0, (reporter, other))
    assert two.core.state.live == [other]
    assert why(two, reporter) == (
        f"unreachable: it alone says that it has no link to {other}; nobody else can tell which of "
        "the two is at fault"
    )
    two.core.close()
