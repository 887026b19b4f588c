"""Fewer sites than the run wants: the others wait, and how they come to be enough again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.refusals import Caller, Refused
from tests.support.coordinator_driver import Driver, run_config

pytestmark = pytest.mark.waits

OUTER = m.ExchangeKey.outer


def test_min_sites_waits_instead_of_deciding(tmp_path: Path) -> None:
    lands_at_once = {"overlap": "none", "delay": 0}
    driver = Driver(tmp_path, run_config(outer={"min_sites": 2, **lands_at_once}))
    driver.start()
    driver.plan(0, "a")
    key = OUTER(0, 0, 0)
    driver.begin(key, "a")
    driver.leave("b")
    assert not driver.beat("a").waits_for_sites
    driver.leave("c")
    assert driver.beat("a").waits_for_sites
    said = [text for *_, text in driver.core.state.feed]
    assert said[-1] == "the run waits for sites: outer.min_sites is 2, active now: 1"
    reply = driver.vote(key, "a", 3, held=["a"])
    assert (reply.decision, reply.waiting_for) == ("wait", [])
    assert driver.plan(1, "a") is None
    # Who enters again makes up the number: its donor has to land this before it can give.
    driver.enrol("b")
    assert driver.beat("b").role == "entering"
    assert driver.vote(key, "a", 3, held=["a"]).decision == "commit"
    assert driver.plan(1, "a") is None
    driver.ready("b")
    assert driver.plan(1, "a") is not None
    driver.core.close()


def test_where_all_are_needed_one_round_is_made_for_what_has_not_landed(tmp_path: Path) -> None:
    """A site that comes back when every exchange has begun gets what these bring from a donor, in
    whose next round they land: so that round is made without it, and no other."""
    driver = Driver(tmp_path, run_config("ab", outer={"min_sites": 2}))
    driver.start()
    assert driver.plan(0, "a") is not None
    for fragment in (0, 1):
        key = m.ExchangeKey.outer(0, 0, fragment)
        for site in "ab":
            driver.begin(key, site)
    driver.leave("b", "crashed", failed=True)
    driver.round_done("a", 0)
    assert driver.plan(1, "a") is None
    driver.enrol("b")
    driver.beat("b")
    entering = driver.core.state.sites["b"]
    assert (entering.role, entering.from_round) == ("entering", 1)
    made = driver.plan(1, "a")
    assert made is not None
    assert list(made.members) == ["a"]
    driver.round_done("a", 1)
    assert driver.plan(2, "a") is None
    driver.ready("b")
    both = driver.plan(2, "a")
    assert both is not None
    assert list(both.members) == ["a", "b"]


def test_a_run_that_waits_for_sites_stops_where_it_is(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("ab", outer={"min_sites": 2}))
    driver.start()
    assert driver.plan(0, "a") is not None
    key = OUTER(0, 0, 0)
    for site in "ab":
        driver.begin(key, site)
    driver.leave("b", "crashed", failed=True)
    assert driver.beat("a").waits_for_sites
    driver.core.departures.stop(m.StopRequest(reason="interrupted"))
    state = driver.core.state
    assert (state.phase, state.stop_tick) == ("stopped", None)
    assert state.reason == "interrupted, while the run waited for sites (there is no checkpoint)"
    # Whatever its ranks ask next, they hear of it; nobody has failed.
    assert driver.beat("a").phase == "stopped"
    with pytest.raises(Refused) as refused:
        driver.vote(key, "a", 2, held=["a"])
    assert refused.value.kind == "stopped"
    with pytest.raises(Refused, match="run stopped: interrupted"):
        driver.plan(1, "a")


def test_a_site_leaves_at_once_while_the_run_waits_for_sites(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abc", outer={"min_sites": 3}))
    driver.start()
    assert driver.plan(0, "a") is not None
    driver.leave("c", "crashed", failed=True)
    request = m.RetireRequest(site="b", reason="asked to go")
    reply = driver.core.departures.retire(request, Caller("b", 1))
    assert reply.text == "site b is out of the run, which waits for sites"
    assert driver.core.state.sites["b"].role == "gone"
    assert driver.core.state.phase == "running"
    # The last one takes the run with it.
    driver.core.departures.retire(m.RetireRequest(site="a", reason="too"), Caller("a", 1))
    assert driver.core.state.phase == "stopped"
