"""A member that is early, or invents an exchange, takes the run over from nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.refusals import Refused
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

USUAL = m.Measured(step_us=500_000, exchange_bytes=1, exchange_us=1, exchanges=1)
KEY = m.ExchangeKey.outer(1, 0, 0)


class Four(Driver):
    """Four sites through round 0. Those of `abc` are honest."""

    def __init__(self, folder: Path, sites: str = "abcm", **sections: Any) -> None:
        super().__init__(folder, run_config(sites, **sections))
        self.start()
        for round_ in (0, 1, 2):
            self.plan(round_, "a")
        for site in sites:
            self.clock.time += 0.1
            self.round_done(site, 0, USUAL)

    def wait(self, seconds: float) -> dict[str, str]:
        """Roles of all sites after so long, in which all of them beat."""
        for _ in range(math.ceil(seconds / 2)):  # a longer pause counts as the coordinator's own
            self.clock.time += seconds / math.ceil(seconds / 2)
            for site in self.config.sites:
                if self.core.state.sites[site].role != "gone":
                    self.beat(site)
            self.core.expire()
        return {name: site.role for name, site in self.core.state.sites.items()}


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Four]:
    made = Four(tmp_path)
    yield made
    made.core.close()


@pytest.mark.parametrize(
    "key",
    [
        m.ExchangeKey.outer(1, 0, 2),
        m.ExchangeKey.outer(1, 0, 77),
        m.ExchangeKey.gradient(1, 0, 0),
    ],
)
def test_an_exchange_that_no_plan_has_is_refused(four: Four, key: m.ExchangeKey) -> None:
    with pytest.raises(Refused, match=f"exchange {key.text}: the plan of round 1 has"):
        four.begin(key, "m")
    assert four.core.state.undecided == {}
    assert four.wait(60.0) == dict.fromkeys("abcm", "active")


def test_gradients_of_a_step_that_a_round_has_not(tmp_path: Path) -> None:
    four = Four(tmp_path, outer={"method": "allreduce"})
    four.begin(m.ExchangeKey.gradient(1, 3, 0), "m")
    for key in (
        m.ExchangeKey.gradient(1, 4, 0),
        m.ExchangeKey.gradient(1, 0, 0, 1),
        m.ExchangeKey.outer(1, 0, 0),
    ):
        with pytest.raises(Refused, match="the plan of round 1 has"):
            four.begin(key, "m")
    four.core.close()


def test_a_majority_waits_for_a_minority_and_not_the_other_way_round(four: Four) -> None:
    four.begin(KEY, "m")
    assert four.wait(120.0) == dict.fromkeys("abcm", "active")
    # Nor are the others set aside one by one.
    four.begin(KEY, "a")
    four.begin(KEY, "b")
    assert four.wait(60.0) == {"a": "active", "b": "active", "c": "entering", "m": "active"}


def test_half_may_go_on_without_half(four: Four) -> None:
    four.begin(KEY, "a")
    four.begin(KEY, "b")
    assert four.wait(60.0) == {"a": "active", "b": "active", "c": "entering", "m": "entering"}


@pytest.mark.parametrize("says_so", [True, False])
def test_who_is_rounds_ahead_waits_for_those_rounds(tmp_path: Path, says_so: bool) -> None:
    """Two sites: b waits in round 2 for a, which has two rounds to train until it is there. As long
    as b is in round 1 by its own account, it waits for nobody."""
    two = Four(tmp_path, "ab", outer={"inner_steps": 80, "rounds": 8})
    a_round = 80 * 0.5
    if says_so:
        two.round_done("b", 1, USUAL)
    two.begin(m.ExchangeKey.outer(2, 0, 0), "b")
    assert two.wait(1.9 * a_round)["a"] == "active"
    late = two.wait(0.2 * a_round + two.core.timeouts.grace)["a"]
    assert late == ("entering" if says_so else "active")
    two.core.close()


def test_who_measures_nothing_may_be_as_late_as_the_others_rounds(four: Four) -> None:
    """m leaves `measured` out, or says that its rounds take years."""
    endless = m.Measured(step_us=2**53, exchange_bytes=1, exchange_us=1, exchanges=1)
    for site in "abc":
        four.round_done(site, 1, USUAL)
        four.begin(m.ExchangeKey.outer(2, 0, 0), site)
    four.round_done("m", 1, endless)
    limits = four.core.timeouts
    assert four.wait(10 * 4 * 0.5 + limits.link)["m"] == "active"
    assert four.wait(limits.grace + 2.0)["m"] == "entering"


def test_a_site_without_a_measurement(tmp_path: Path) -> None:
    four = Four(tmp_path)
    for sites in four.core.state.measured.values():
        del sites["m"]
    for site in "abc":
        four.begin(KEY, site)
    assert four.wait(four.core.timeouts.grace + 1.9)["m"] == "active"
    assert four.wait(2.0)["m"] == "entering"
    four.core.close()


def test_the_first_round_has_an_end_too(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abm"))
    driver.start()
    driver.plan(0, "a")
    for site in "ab":
        driver.begin(m.ExchangeKey.outer(0, 0, 0), site)
    assert Four.wait(driver, driver.core.timeouts.stall)["m"] == "active"  # type: ignore[arg-type]
    late = Four.wait(driver, driver.core.timeouts.grace + 2.0)  # type: ignore[arg-type]
    assert late == {"a": "active", "b": "active", "m": "entering"}
    driver.core.close()


def recorded(tmp_path: Path) -> Driver:
    """Four sites, with a recorder behind the coordinator."""
    config = run_config("abcm", run={"folder": str(tmp_path)})
    (tmp_path / config.run.name).mkdir()
    recorder = RunMetrics(config, config.folder, lambda record: None)
    return Driver(
        tmp_path / "coordinator",
        config,
        on_report=recorder.report,
        on_plan=lambda plan: recorder.plan(plan.model_dump(mode="json")),
    )


def report(driver: Driver, site: str, round_: int, digit: str) -> None:
    """A site's report of a round, with an anchor digest of this digit."""
    numbers = dict.fromkeys(
        ("step", "tokens", "seconds", "tokens_per_second", "wait_share", "payload_bytes",
         "allreduce_bytes", "ratio_per_transfer"), 1,
    )  # fmt: skip
    said = {**numbers, "members": 4, "anchor_digest": digit * 64}
    rank = driver.check(m.RankId(site=site, stage=0, shard=0))
    driver.core.report(m.ReportRequest(rank=rank, round=round_, metrics=said))


def test_a_false_anchor_digest_costs_its_sender_not_the_run(tmp_path: Path) -> None:
    driver = recorded(tmp_path)
    driver.start()
    driver.plan(0, "a")
    for site in "mabc":
        report(driver, site, 0, "f" if site == "m" else "0")
    state = driver.core.state
    assert state.phase == "running"
    assert {name: site.role for name, site in state.sites.items()} == {
        "a": "active", "b": "active", "c": "active", "m": "gone",
    }  # fmt: skip
    assert state.sites["m"].reason == "round 0: it holds another anchor than most sites do"
    far = m.ReportRequest(rank=m.RankId(site="a", stage=0, shard=0), round=9, metrics={})
    with pytest.raises(Refused, match="reports of round 9"):
        driver.core.report(far)
    driver.core.close()


def test_no_lease_beyond_the_rounds_that_are_planned(four: Four) -> None:
    """A rank that says its slots take no time does not put off the end of a run that is stopped."""
    state = four.core.state
    for _ in range(20):
        four.clock.time += 0.1
        four.beat("m", tick=state.lease, slot_seconds=1e-7)
    last = state.plans[max(state.plans)]
    assert state.lease == last.first_tick + 2 * last.slots
    stopped = four.core.departures.stop(m.StopRequest(reason="interrupted"))
    assert stopped.stop_tick == state.lease


def test_who_says_that_it_is_infinitely_fast_is_given_much_and_has_half_the_weight_at_most(
    tmp_path: Path,
) -> None:
    outer = {"rounds": 8, "inner_steps": 20}
    driver = Driver(tmp_path, run_config("abcm", outer=outer, control={"steps": "by-speed"}))
    driver.start()
    given = []
    for round_ in range(7):
        plan = driver.plan(round_, "a")
        assert plan is not None
        given.append([plan.steps_of(site) for site in "abcm"])
        for site in "abcm":
            said = m.Measured(step_us=1 if site == "m" else 500_000, exchange_bytes=1,
                              exchange_us=1, exchanges=1)  # fmt: skip
            driver.round_done(site, round_, said)
    assert plan is not None
    weights = {site: member.weight for site, member in plan.members.items()}
    assert weights["m"] == pytest.approx(2.0)
    assert weights["a"] == pytest.approx(2.0 / 3)
    # More by half every round, from the first that three rounds are known to.
    assert given == [[20, 20, 20, steps] for steps in (20, 20, 20, 20, 30, 45, 67)]
    told = [text for *_, text in driver.core.state.feed if "speed" in text]
    assert told == [
        "m goes at 225 % of the typical site's speed from round 5 on, before at 150 %, by what "
        "sites measure"
    ]
    driver.core.close()


def test_who_gave_a_state_that_most_do_not_hold_is_named_and_asked_last(tmp_path: Path) -> None:
    driver = recorded(tmp_path)
    driver.start()
    for round_ in (0, 1):
        driver.plan(round_, "a")
        for site in "abcm":
            driver.round_done(site, round_, USUAL)
    state = driver.core.state
    for site in ("b", "c"):
        driver.leave(site)
    driver.join("c")
    assert (state.sites["c"].role, state.sites["c"].entered_from) == ("active", "a")
    driver.join("b")
    driver.plan(2, "m")
    for site in "abcm":
        report(driver, site, 2, "f" if site == "c" else "0")
    assert state.sites["c"].reason.endswith("than most sites do; it entered with the state of a")
    driver.enrol("c")
    driver.beat("c")
    assert (state.sites["c"].role, state.sites["c"].donor) == ("entering", "b")
    assert replayed(driver) == state
    driver.core.close()
