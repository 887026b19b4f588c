"""Sites that enter while the others train slowly, leave, or end: nobody waits for them in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.refusals import Caller
from tests.support.coordinator_driver import Driver, run_config

pytestmark = pytest.mark.waits

KEY = m.ExchangeKey.outer


def training_slowly(folder: Path, **outer: int) -> Driver:
    """Two of three sites in the fourth of 20 slots, of 3 s each: more than a lease goes ahead."""
    sizes = {"rounds": 40, "inner_steps": 20, "fragments": 1, **outer}
    driver = Driver(folder, run_config(outer=sizes), wait_for=2)
    for site in "ab":
        driver.enrol(site)
    for site in "ab":
        driver.ready(site)
    assert driver.plan(0, "a") is not None
    for tick in range(4):
        driver.clock.time += 3
        for site in "ab":
            driver.beat(site, tick, slot_seconds=3.0)
    return driver


def test_who_has_just_entered_plans_no_round_that_others_are_far_from(tmp_path: Path) -> None:
    """It follows rounds without inner steps, and is at their end at once."""
    driver = training_slowly(tmp_path)
    driver.join("c")
    assert driver.core.state.sites["c"].role == "active"
    assert driver.plan(1, "c") is None
    assert driver.core.plan(1, Caller("c", 1)).waiting_for == "an active site to ask for it"
    plan = driver.plan(1, "a")
    assert plan is not None
    assert list(plan.members) == ["a", "b", "c"]


def test_where_nobody_trains_any_more_it_plans(tmp_path: Path) -> None:
    driver = training_slowly(tmp_path)
    driver.join("c")
    for site in "ab":
        driver.leave(site)
    plan = driver.plan(1, "c")
    assert plan is not None
    assert list(plan.members) == ["c"]
    # It gets there: of the round before nobody trains the rest.
    assert driver.beat("c").lease >= plan.first_tick


def test_what_nobody_contributes_to_any_more_is_decided(tmp_path: Path) -> None:
    """The newcomer has begun an exchange of those who train, and would wait for it for ever."""
    driver = training_slowly(tmp_path)
    driver.enrol("c")
    driver.beat("c")
    driver.begin(KEY(0, 0, 0), "c")
    driver.ready("c")
    for site in "ab":
        driver.leave(site)
    exchange = driver.core.state.exchanges["outer/0/0/0"]
    assert exchange.decision == []


def test_a_stop_waits_for_no_checkpoint_of_one_that_has_not_trained(tmp_path: Path) -> None:
    driver = training_slowly(tmp_path)
    driver.join("c")
    # Planned before the stop, c is in it; it turns back before it has heard of that.
    plan = driver.plan(1, "a")
    assert plan is not None
    assert "c" in plan.members
    for tick in range(4, 21):
        driver.clock.time += 3
        for site in "ab":
            driver.beat(site, tick, slot_seconds=3.0)
    stop = driver.core.departures.stop(m.StopRequest(reason="SIGINT")).stop_tick
    driver.finish("c", complete=False)
    for site in "ab":
        driver.round_done(site, 0)
        driver.write_checkpoint(site, stop, 1, stop - 20)
        driver.finish(site, complete=False)
    assert driver.core.state.phase == "stopped"
    assert driver.core.state.checkpoints[stop].sites == ["a", "b"]


def test_rounds_planned_while_the_run_stops_are_of_those_who_train(tmp_path: Path) -> None:
    driver = training_slowly(tmp_path)
    driver.join("c")
    driver.core.departures.stop(m.StopRequest(reason="SIGINT"))
    plan = driver.plan(1, "a")
    assert plan is not None
    assert list(plan.members) == ["a", "b"]


def test_a_site_that_was_left_behind_and_leaves_is_gone(tmp_path: Path) -> None:
    driver = training_slowly(tmp_path)
    driver.join("c")
    site = driver.core.state.sites["c"]
    site.role, site.leave_round = "entering", 1
    rank = m.RankId(site="c", stage=0, shard=0)
    driver.core.departures.depart(m.DepartRequest(rank=rank))
    assert site.role == "gone"


def test_the_flush_is_exchanged_between_those_in_its_plan(tmp_path: Path) -> None:
    """Who gets its last piece after that was made would not begin it, and all would wait."""
    driver = Driver(tmp_path, run_config(outer={"rounds": 1, "fragments": 1}), wait_for=2)
    for site in "ab":
        driver.enrol(site)
    for site in "ab":
        driver.ready(site)
    assert driver.plan(0, "a") is not None
    driver.enrol("c")
    driver.beat("c")
    for site in "ab":
        driver.begin(KEY(0, 0, 0), site)
    for site in "ab":
        driver.vote(KEY(0, 0, 0), site, held=["a", "b"])
        driver.round_done(site, 0)
    flush = driver.plan(1, "a")
    assert flush is not None
    assert (flush.kind, list(flush.members)) == ("flush", ["a", "b"])
    driver.begin(KEY(1, 0, 0), "a")
    driver.ready("c")
    assert driver.core.state.sites["c"].role == "active"
    assert [each.site for each in driver.begin(KEY(1, 0, 0), "b").members] == ["a", "b"]


def test_a_site_has_the_keys_of_one_entry(tmp_path: Path) -> None:
    """The store has room for so many: sites that come again and again must not fill it."""
    driver = training_slowly(tmp_path)
    store = driver.core.store
    for number in range(1, 4):
        driver.enrol("c")
        driver.beat("c")
        name = f"run/entry/c/{number}/0/a/0/0/donor"
        store.set(m.StoreSetRequest(key=name, value=""), Caller("a", 1))
        assert list(driver.core.state.store) == [name]
        driver.leave("c")
