"""A run that is to stop when a site that it needs has died: one interrupt ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.refusals import Refused
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

OUTER = m.ExchangeKey.outer


def training(folder: Path, sites: str = "ab", **sections: Any) -> Driver:
    """Sites that train, each slot of which ends with a landing; two of them are needed."""
    outer = {"min_sites": 2, "overlap": "none", "delay": 0, **sections.pop("outer", {})}
    driver = Driver(folder, run_config(sites, outer=outer, **sections))
    driver.start()
    assert driver.plan(0, "a") is not None
    for site in sites:
        driver.beat(site)
    return driver


def stop(driver: Driver) -> int:
    tick = driver.core.departures.stop(m.StopRequest(reason="interrupted")).stop_tick
    assert tick is not None
    assert driver.core.state.phase == "stopping"
    return tick


def decide(driver: Driver, round_: int) -> None:
    """All exchanges of a round are begun, voted on and decided."""
    sites = driver.core.state.with_role("active")
    for fragment in range(driver.core.state.plans[round_].fragments):
        key = OUTER(round_, 0, fragment)
        for site in sites:
            driver.begin(key, site)
        for site in sites:
            driver.vote(key, site, held=sites)
        assert driver.core.state.exchanges[key.text].decision == "commit"


@pytest.mark.parametrize("death", ["says so", "falls silent"])
@pytest.mark.parametrize("method", ["dilocox", "allreduce"])
def test_it_ends_when_a_needed_site_dies_after_the_interrupt(
    tmp_path: Path, death: str, method: str
) -> None:
    given = {} if method == "dilocox" else {"method": method, "delay": 1}
    driver = training(tmp_path, outer=given)
    stop(driver)
    core = driver.core
    if method == "allreduce":
        # Which steps are left is no matter of the plan: it waits once it has begun one.
        driver.begin(m.ExchangeKey.gradient(0, 1, 0), "a")
    if death == "says so":
        driver.leave("b", "crashed", failed=True)
    else:
        for _ in range(100):
            driver.clock.time += core.timeouts.beat
            if core.state.phase != "stopping":
                break
            driver.beat("a")
            core.expire()
        assert core.state.sites["b"].role == "gone"
    assert core.state.phase == "stopped"
    reason = "interrupted, while the run waited for sites (there is no checkpoint)"
    assert core.state.reason == reason
    assert driver.beat("a").phase == "stopped"
    with pytest.raises(Refused, match="run stopped: interrupted"):
        driver.plan(1, "a")
    assert replayed(driver) == core.state
    core.close()


def test_one_of_three_may_die(tmp_path: Path) -> None:
    driver = training(tmp_path, "abc")
    stop(driver)
    driver.leave("c", "crashed", failed=True)
    assert driver.core.state.phase == "stopping"
    driver.leave("b", "crashed", failed=True)
    assert driver.core.state.phase == "stopped"
    driver.core.close()


def test_who_needs_no_decision_any_more_still_writes_the_checkpoint(tmp_path: Path) -> None:
    driver = training(tmp_path, outer={"rounds": 40, "inner_steps": 20})
    core = driver.core
    round_ = 0
    while core.state.plans[round_].first_tick + core.state.plans[round_].slots < core.state.lease:
        decide(driver, round_)
        for site in "ab":
            driver.round_done(site, round_)
        round_ += 1
        assert driver.plan(round_, "a") is not None
    tick = stop(driver)
    plan = core.state.plans[round_]
    assert plan.first_tick < tick < plan.first_tick + plan.slots
    driver.leave("b", "crashed", failed=True)
    assert core.state.phase == "stopping"
    driver.write_checkpoint("a", tick, round_, tick - plan.first_tick)
    driver.finish("a", complete=False)
    assert (core.state.phase, core.state.reason) == ("stopped", "interrupted")
    assert core.state.checkpoints[tick].sites == ["a"]
    core.close()


def test_a_coordinator_that_starts_again_ends_it_too(tmp_path: Path) -> None:
    driver = training(tmp_path)
    stop(driver)
    driver.reopen()
    assert driver.core.state.phase == "stopping"
    driver.leave("b", "crashed", failed=True)
    assert driver.core.state.phase == "stopped"
    driver.core.close()
