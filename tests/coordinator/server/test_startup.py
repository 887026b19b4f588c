"""A start in which sites die, are silent, or do not have what the run goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.ledger_audit import audit
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.state import CoordinatorState
from tests.support.coordinator_driver import Driver, numbers, replayed, run_config

pytestmark = pytest.mark.waits

OUTER = m.ExchangeKey.outer
TICK = 6
"""Two slots into round 1."""


class Opener(Driver):
    """A driver whose coordinator is closed at the end of the test."""

    def __init__(self, folder: Path, sites: str = "abc", min_sites: int = 1, **sections: Any):
        config = run_config(sites, **{"outer": {"min_sites": min_sites}, **sections})
        super().__init__(folder, config)

    @property
    def state(self) -> CoordinatorState:
        return self.core.state

    def roles(self) -> dict[str, str]:
        return {name: site.role for name, site in self.state.sites.items()}

    def silence(self, *beating: str) -> None:
        """Longer than any rank may take to its first beat; only these sites beat."""
        for _ in range(20):
            self.clock.time += 2.0
            for site in beating:
                self.beat(site, self.state.lease)
            self.core.expire()

    def write(self, *sites: str) -> None:
        """The sites' parts of the checkpoint at `TICK`."""
        for site in sites:
            self.write_checkpoint(site, TICK, 1, 2)

    def rounds(self) -> list[m.RoundPlan]:
        """Round 0 of all sites, and the plan of round 1."""
        plans = [self.plan(0, "a"), self.plan(1, "a")]
        for site in self.config.sites:
            self.round_done(site, 0)
        return [plan for plan in plans if plan is not None]

    def resume(self, *sites: str) -> None:
        """Go back to the checkpoint; these sites enrol, and go on from it."""
        self.core.resume()
        self.enrol_all()
        for site in sites:
            self.ready(site)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Opener] = []

    def one(*args: Any, **options: Any) -> Opener:
        made.append(Opener(tmp_path / str(len(made)), *args, **options))
        return made[-1]

    yield one
    for driver in made:
        assert replayed(driver) == driver.state
        driver.core.close()


# --- who is not heard of -------------------------------------------------------------------------


def test_a_site_that_is_silent_after_a_resume_is_noticed(make: Any) -> None:
    driver = make()
    driver.start()
    driver.rounds()
    driver.write(*"abc")
    driver.core.departures.stop(m.StopRequest(reason="pause"))
    for site in "abc":
        driver.finish(site, complete=False)
    assert driver.state.phase == "stopped"
    driver.core.resume()
    driver.enrol_all()
    driver.silence("a", "b")
    assert driver.roles()["c"] == "gone"
    assert driver.enrol("c").incarnation == 3
    driver.silence("a", "b")
    assert driver.roles()["c"] == "gone"


def test_a_site_that_is_silent_after_it_has_left_and_come_again_is_noticed(make: Any) -> None:
    driver = make(site={"shards": 2})
    driver.start()
    driver.rounds()
    driver.core.departures.retire(m.RetireRequest(site="c", reason="-"), Caller("operator", 0))
    for rank in driver.ranks("c"):
        driver.core.departures.depart(m.DepartRequest(rank=driver.check(rank)))
    assert driver.roles()["c"] == "gone"
    driver.enrol("c")
    # One rank of two is not all of them.
    driver.core.beat(m.BeatRequest(rank=driver.ranks("c")[0], tick=0, round=0, slot=0))
    assert driver.roles()["c"] == "enrolled"
    driver.silence("a", "b")
    assert driver.roles()["c"] == "gone"


def test_a_disk_that_is_full_while_the_run_starts_leaves_nobody_unwatched(make: Any) -> None:
    driver = make("ab")
    driver.enrol("a")
    append = driver.core.log.append

    def full(event: e.Event) -> None:
        if isinstance(event, e.Started):
            raise OSError("disk full")
        append(event)

    driver.core.log.append = full
    with pytest.raises(OSError, match="disk full"):
        driver.enrol("b")
    driver.core.log.append = append
    driver.silence("a")
    assert driver.roles()["b"] == "gone"


def test_a_resumed_run_has_forgotten_who_left_and_finished(make: Any) -> None:
    driver = make()
    driver.start()
    driver.rounds()
    driver.write(*"abc")
    driver.core.departures.retire(m.RetireRequest(site="c", reason="-"), Caller("operator", 0))
    driver.core.departures.depart(m.DepartRequest(rank=driver.ranks("c")[0]))
    driver.finish("a")
    driver.core.resume()
    for site in driver.state.sites.values():
        assert (site.finished, site.left, site.leave_round) == (set(), set(), None)


# --- deaths while the run starts -----------------------------------------------------------------


def test_a_site_that_dies_and_comes_again_counts_for_min_sites(make: Any) -> None:
    driver = make("ab", min_sites=2)
    driver.enrol_all()
    driver.ready("a")
    driver.leave("b", failed=True)
    assert driver.state.phase == "starting"
    driver.join("b")
    assert driver.roles() == {"a": "active", "b": "active"}
    plan = driver.plan(0, "a")
    assert plan is not None
    assert list(plan.members) == ["a", "b"]


def test_a_log_in_which_a_start_hangs_goes_on(make: Any) -> None:
    """As an older coordinator has left it: both are there and ready, and nothing follows."""
    driver = make("ab", min_sites=2)
    driver.enrol_all()
    driver.ready("a")
    driver.leave("b", failed=True)
    driver.enrol("b")
    for event in (e.Entered(0.0, "b", "a"), e.Ready(0.0, "b", 0, 0)):
        driver.core.log.append(event)
    driver.reopen()
    assert driver.roles() == {"a": "active", "b": "active"}


def test_without_a_founder_the_sites_join_again(make: Any) -> None:
    driver = make("ab")
    driver.enrol_all()
    driver.leave("a", failed=True)
    driver.enrol("a")
    assert driver.beat("a").donor == "b"
    epoch = driver.state.epoch
    driver.leave("b", failed=True)
    # a waits for a state that nobody has any more.
    assert (driver.state.phase, driver.state.founder) == ("enrolling", None)
    assert driver.state.epoch > epoch
    assert "nobody is left to start from" in driver.state.feed[-1][3]
    with pytest.raises(Refused, match=r"the start begins anew.; join the run again"):
        driver.beat("a")
    driver.reopen()
    driver.enrol_all()
    assert (driver.state.phase, driver.state.founder) == ("starting", "a")
    driver.silence("a", "b")
    for site in "ab":
        driver.ready(site)
    assert driver.roles() == {"a": "active", "b": "active"}


def test_who_has_not_begun_to_fetch_stays_when_the_start_begins_anew(make: Any) -> None:
    driver = make("ab")
    driver.enrol_all()
    driver.leave("a", failed=True)
    driver.enrol("a")
    driver.leave("b", failed=True)
    assert (driver.state.phase, driver.roles()["a"]) == ("enrolling", "enrolled")
    driver.enrol("b")
    assert driver.state.phase == "starting"


def test_a_run_that_has_lost_all_sites_while_it_starts_has_failed(make: Any) -> None:
    driver = make("ab")
    driver.enrol_all()
    for site in "ab":
        driver.leave(site, failed=True)
    assert driver.state.phase == "failed"


def test_a_method_that_lets_nobody_in_begins_anew_with_too_few(make: Any) -> None:
    driver = make("ab", outer={"method": "allreduce", "min_sites": 2})
    driver.enrol_all()
    driver.leave("b", failed=True)
    assert (driver.state.phase, driver.roles()["a"]) == ("enrolling", "gone")
    driver.start()
    assert driver.roles() == {"a": "active", "b": "active"}


def test_what_a_site_has_from_its_checkpoint_outlives_the_founder(make: Any) -> None:
    driver = make("ab", site={"shards": 2})
    driver.start()
    driver.rounds()
    driver.write(*"ab")
    driver.resume()
    first, second = driver.ranks("b")
    driver.core.ready(m.ReadyRequest(rank=first))
    driver.leave("a", failed=True)
    driver.core.ready(m.ReadyRequest(rank=second))
    assert driver.roles()["b"] == "active"


def test_a_site_that_dies_while_it_takes_up_its_checkpoint_is_waited_for_again(make: Any) -> None:
    driver = make("ab")
    driver.start()
    driver.rounds()
    driver.write(*"ab")
    driver.resume()
    driver.leave("b", failed=True)
    driver.enrol("b")
    driver.beat("b")
    driver.ready("a")
    # Without it b would take up a round that the others have no place for it in.
    assert driver.state.phase == "starting"
    driver.ready("b")
    assert {site.active_from for site in driver.state.sites.values()} == {0}


# --- going on from a checkpoint ------------------------------------------------------------------


def dies_after_writing(driver: Opener) -> list[m.RoundPlan]:
    """c writes its part and dies while b is still writing."""
    driver.start()
    plans = driver.rounds()
    driver.write("a", "c")
    driver.leave("c", failed=True)
    driver.write("b")
    return plans


def finish_round(driver: Opener, round_: int, *sites: str) -> m.RoundPlan:
    """The plan of the round after, once these sites are through with `round_`."""
    for site in sites:
        driver.round_done(site, round_)
    plan = driver.plan(round_ + 1, sites[0])
    assert plan is not None
    return plan


def test_a_site_that_died_after_writing_has_its_ranges_again(make: Any) -> None:
    driver = make()
    plans = dies_after_writing(driver)
    driver.resume(*"abc")
    assert driver.plan(1, "c") == plans[1]
    after = finish_round(driver, 1, *"abc")
    assert not set(numbers(plans[1])) & set(numbers(after))
    found = audit(driver.state.ledger)
    assert (found.doubled, found.missing, found.waiting) == (0, 0, 0)
    assert found.committed == len(numbers(plans[0])) + len(numbers(plans[1]))


def test_if_it_stays_away_the_others_have_them_once(make: Any) -> None:
    driver = make()
    driver.options["wait_for"] = 2
    plans = dies_after_writing(driver)
    driver.reopen()
    driver.core.resume()
    for site in "ab":
        driver.enrol(site)
    for site in "ab":
        driver.ready(site)
    after = finish_round(driver, 1, *"ab")
    lost = plans[1].members["c"].ranges
    assert after.members["a"].ranges == lost
    found = audit(driver.state.ledger)
    assert (found.doubled, found.missing) == (0, 0)


def test_what_was_trained_after_the_checkpoint_and_given_up_is_given_out_again(make: Any) -> None:
    driver = make()
    driver.options["wait_for"] = 2
    driver.start()
    plans = driver.rounds()
    driver.write("a", "c")
    driver.round_done("c", 1)
    driver.write("b")
    driver.reopen()
    driver.core.resume()
    for site in "ab":
        driver.enrol(site)
    for site in "ab":
        driver.ready(site)
    assert finish_round(driver, 1, *"ab").members["a"].ranges == plans[1].members["c"].ranges


def without_a_part(driver: Opener) -> list[m.RoundPlan]:
    """c dies before it has written its part."""
    driver.start()
    plans = driver.rounds()
    driver.write("a")
    driver.leave("c", failed=True)
    driver.write("b")
    return plans


def test_a_site_without_its_part_enters_when_the_others_go_on(make: Any) -> None:
    driver = make()
    plans = without_a_part(driver)
    driver.resume()
    # Nothing is fetched yet: what is in flight could not land on it.
    assert driver.beat("c").role == "enrolled"
    for site in "ab":
        driver.ready(site)
    assert {name: driver.state.sites[name].active_from for name in "ab"} == {"a": 0, "b": 0}
    enters = [each for each in driver.beat("c").entering if each.site == "c"]
    assert [(each.donor, each.from_round) for each in enters] == [("a", 2)]
    # An exchange in flight, and one of the rest of the round, are carried without it.
    for key in (OUTER(0, 0, 1), OUTER(1, 0, 1)):
        assert [member.site for member in driver.begin(key, "a").members] == ["a", "b"]
        driver.vote(key, "a", held=["a", "b"])
        assert driver.vote(key, "b", held=["a", "b"]).set == ["a", "b"]
    driver.ready("c")
    assert driver.state.sites["c"].active_from == 2
    after = finish_round(driver, 1, *"ab")
    assert list(after.members) == ["a", "b", "c"]
    # Nobody has trained what the recorded plan gives to c.
    assert after.members["a"].ranges == plans[1].members["c"].ranges
    finish_round(driver, 2, *"abc")
    found = audit(driver.state.ledger)
    assert (found.doubled, found.missing) == (0, 0)


def test_a_site_that_has_lost_its_part_says_so_by_what_it_asks_for(make: Any) -> None:
    driver = make()
    driver.start()
    plans = driver.rounds()
    driver.write(*"abc")
    driver.resume("a")
    told = [each for each in driver.beat("c").entering if each.site == "c"]
    assert [(each.donor, each.from_round) for each in told] == [("a", 2)]
    # What ranks ask for that have taken up theirs says nothing.
    for site in "abc":
        assert driver.plan(1, site) == plans[1]
    assert driver.state.starters == ["a", "b", "c"]
    assert driver.plan(told[0].from_round, "c") is None
    assert driver.state.starters == ["a", "b"]
    assert "c has no part of the checkpoint: it enters from a" in driver.state.feed[-1][3]
    driver.reopen()
    driver.beat("c")
    driver.ready("b")
    assert driver.state.phase == "running"
    assert driver.roles()["c"] == "entering"
    key = OUTER(0, 0, 1)
    assert [member.site for member in driver.begin(key, "b").members] == ["a", "b"]
    driver.ready("c")
    assert driver.state.sites["c"].active_from == 2
    after = finish_round(driver, 1, *"ab")
    assert after.members["a"].ranges == plans[1].members["c"].ranges


def test_a_site_without_its_part_makes_up_the_number(make: Any) -> None:
    driver = make("ab", min_sites=2)
    driver.start()
    driver.rounds()
    driver.write(*"ab")
    driver.resume("a")
    assert driver.state.phase == "starting"
    driver.plan(2, "b")
    assert driver.roles() == {"a": "active", "b": "entering"}


def test_the_founder_is_one_that_has_the_checkpoint(make: Any) -> None:
    driver = make()
    driver.start()
    driver.rounds()
    driver.leave("a", failed=True)
    driver.write("b", "c")
    driver.resume("b", "c")
    assert driver.state.founder == "b"
    assert driver.roles() == {"a": "enrolled", "b": "active", "c": "active"}


def test_a_site_that_was_to_leave_before_the_round_enters_again(make: Any) -> None:
    """It has its part, and no plan of the round: it would wait for ever to be overtaken."""
    driver = make()
    driver.start()
    driver.plan(0, "a")
    for site in "abc":
        driver.round_done(site, 0)
    driver.write_checkpoint("c", 4, 1, 0)
    driver.core.departures.retire(m.RetireRequest(site="c", reason="-"), Caller("operator", 0))
    plan = driver.plan(1, "a")
    assert plan is not None
    assert list(plan.members) == ["a", "b"]
    for site in "ab":
        driver.write_checkpoint(site, 4, 1, 0)
    driver.resume("a", "b")
    assert driver.state.phase == "running"
    driver.beat("c")
    assert (driver.roles()["c"], driver.state.sites["c"].from_round) == ("entering", 2)


def test_logs_of_before_add_up_to_what_they_did(make: Any) -> None:
    """Without what events say since, a start is what it was."""
    driver = make()
    plans = without_a_part(driver)
    driver.core.resume()
    resumed = [event for event in driver.core.log.events() if isinstance(event, e.Resumed)]
    state = replayed(driver)
    assert resumed
    for site in "abc":
        enrolled = e.Enrolled(0.0, site, 2, "", "", {}, None)
        state.apply(enrolled)
    state.apply(e.Started(0.0, ["a", "b", "c"], "a"))
    assert {site.from_round for site in state.sites.values()} == {1}
    for site in "abc":
        state.apply(e.Ready(0.0, site, 0, 0))
    state.apply(e.Activated(0.0, dict.fromkeys("abc", 1)))
    assert [site.active_from for site in state.sites.values()] == [0, 0, 0]
    state.apply(e.Overtaken(0.0, "c", 2, "a", "late"))
    assert state.sites["c"].from_round == 1
    assert plans[1].round == 1
