"""Plans that follow what sites measure: waited for, logged, replayed, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import resolve_run
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.events import Sized
from dilocox.coordinator.server.refusals import Caller
from dilocox.coordinator.server.service import Coordinator
from dilocox.coordinator.server.startup import RunStart
from dilocox.errors import TrainingError
from tests.support.controller_inputs import menu
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

LINK: dict[str, Any] = {
    "outer": {"rounds": None, "steps": 400},
    "control": {"adapt": "link", "pinned": []},
}


def measured(
    rate: int, step_us: int = 100_000, payload: int = 100_000, rank: int | None = None
) -> m.Measured:
    """4 payloads at `rate` bytes per second."""
    return m.Measured(
        step_us=step_us,
        exchange_bytes=4 * payload,
        exchange_us=4 * payload * 1_000_000 // rate,
        exchanges=4,
        effective_rank_milli=rank,
    )


class Adaptive(Driver):
    """Sites that measure."""

    def __init__(self, folder: Path, sites: str = "ab", **sections: Any) -> None:
        config = run_config(sites, **{**LINK, **sections})
        self.plans: list[m.RoundPlan] = []
        super().__init__(folder, config, payloads=menu(config), on_plan=self.plans.append)

    def rounds(self, first: int, last: int, **by_site: m.Measured | None) -> None:
        """All sites go through rounds `first` to `last` and measure what is given."""
        for round_ in range(first, last + 1):
            assert self.plan(round_, "a") is not None
            for site, own in by_site.items():
                self.round_done(site, round_, own)

    def chosen(self, round_: int) -> tuple[int, str]:
        plan = self.core.state.plans[round_]
        return plan.inner_steps, plan.codec


@pytest.fixture
def adaptive(tmp_path: Path) -> Iterator[Adaptive]:
    made = Adaptive(tmp_path)
    made.start()
    yield made
    made.core.close()


def test_a_plan_waits_for_the_measurements_that_it_goes_by(adaptive: Adaptive) -> None:
    assert [adaptive.plan(round_, "a") is not None for round_ in (0, 1, 2)] == [True, True, False]
    for made in adaptive.plans:
        assert (made.codec, made.reason) == ("int4+moments", "nothing is measured yet")
    adaptive.round_done("a", 0, measured(10**6))
    waiting = adaptive.core.plan(2, Caller("a", 1)).waiting_for
    assert waiting == "the end of round 0 at b"
    adaptive.round_done("b", 0, measured(10**5))
    plan = adaptive.plan(2, "a")
    assert plan is not None
    # The slowest link counts.
    assert plan.estimate == m.LinkEstimate(
        step_us=100_000,
        rate=100_000,
        latency_us=0,
        payload=100_000,
        works={"int4": 0},
        overheads={plan.fragments: 0},
        least=(100_000, 1_000_000),
    )
    assert "at 800 kbit/s and 100 ms a step" in plan.reason
    assert adaptive.chosen(2) != adaptive.chosen(1)
    assert [entry.round for entry in adaptive.plans] == [0, 1, 2]


def test_plans_follow_the_link_and_rest_in_between(adaptive: Adaptive) -> None:
    fast, slow = measured(10**7), measured(10**5)
    adaptive.rounds(0, 5, a=fast, b=fast)
    assert len({adaptive.chosen(round_) for round_ in range(2, 6)}) == 1
    adaptive.rounds(6, 6, a=slow, b=fast)
    adaptive.rounds(7, 8, a=slow, b=fast)
    assert adaptive.chosen(7) == adaptive.chosen(5)  # round 6 has not been looked at
    assert adaptive.chosen(8) != adaptive.chosen(5)
    adaptive.rounds(9, 10, a=slow, b=fast)
    assert adaptive.chosen(10) == adaptive.chosen(8)


def test_replay_and_restart_give_the_same_plans(adaptive: Adaptive) -> None:
    adaptive.rounds(0, 3, a=measured(10**6), b=measured(10**5))
    assert replayed(adaptive) == adaptive.core.state
    before = adaptive.core.state
    # The sizes are in the log: a coordinator that starts again needs nobody to tell it.
    adaptive.options["payloads"] = None
    adaptive.reopen()
    assert adaptive.core.state == before
    adaptive.rounds(4, 4, a=measured(10**6), b=measured(10**5))
    assert adaptive.chosen(4) == adaptive.chosen(3)


def test_a_resumed_run_goes_on_from_what_was_measured(adaptive: Adaptive) -> None:
    slow = measured(10**5)
    adaptive.rounds(0, 3, a=slow, b=slow)
    plan = adaptive.plan(4, "a")
    assert plan is not None
    for site in "ab":
        adaptive.write_checkpoint(site, plan.first_tick, 4, 0)
    adaptive.rounds(4, 5, a=slow, b=slow)
    course = [adaptive.chosen(round_) for round_ in (4, 5)]
    adaptive.core.resume()
    state = adaptive.core.state
    assert sorted(state.measured) == [0, 1, 2, 3]
    assert state.plans[4] == plan
    adaptive.start()
    adaptive.rounds(5, 5, a=None, b=None)
    assert [adaptive.chosen(round_) for round_ in (4, 5)] == course
    assert replayed(adaptive) == state


def test_old_measurements_are_forgotten(adaptive: Adaptive) -> None:
    fast = measured(10**8)
    adaptive.rounds(0, 60, a=fast, b=fast)
    # What paces are made from, the rounds in which decisions are remembered, and those under way.
    assert min(adaptive.core.state.measured) == 60 - 40 - 4


def test_a_site_that_comes_back_is_measured_anew(adaptive: Adaptive) -> None:
    fast = measured(10**8)
    adaptive.rounds(0, 5, a=fast, b=fast)
    adaptive.leave("b", failed=True)
    assert "b" in adaptive.core.state.measured[3], "until another comes in its place"
    adaptive.enrol("b")
    assert all("b" not in sites for sites in adaptive.core.state.measured.values())
    assert all("a" in adaptive.core.state.measured[round_] for round_ in range(6))


def test_a_site_that_left_is_not_waited_for_and_does_not_count(tmp_path: Path) -> None:
    driver = Adaptive(tmp_path, "abc")
    driver.start()
    driver.plan(0, "a")
    driver.plan(1, "a")
    driver.round_done("c", 0, measured(10**3))
    driver.leave("c")
    for site in "ab":
        driver.round_done(site, 0, measured(10**6))
    plan = driver.plan(2, "a")
    assert plan is not None
    assert plan.estimate is not None
    assert plan.estimate.rate == 10**6
    driver.core.close()


def test_what_is_declared_is_planned_for_from_the_start(tmp_path: Path) -> None:
    control = {"adapt": "link", "pinned": [], "link": "800kbit", "step_seconds": 0.1}
    driver = Adaptive(tmp_path, control=control)
    driver.start()
    # Nothing to wait for: two rounds ahead, as with a fixed plan.
    assert [driver.plan(r, "a") is not None for r in range(4)] == [True, True, True, False]
    assert len({driver.chosen(r) for r in range(3)}) == 1
    assert "at 800 kbit/s" in driver.plans[0].reason
    driver.core.close()


def test_inner_steps_add_up_whatever_is_chosen(adaptive: Adaptive) -> None:
    course = []
    for round_ in range(400):
        plan = adaptive.plan(round_, "a")
        assert plan is not None
        course.append(plan)
        if plan.kind == "flush":
            break
        own = measured(10 ** (3 + round_ // 6 % 5))
        for site in "ab":
            adaptive.round_done(site, round_, own)
    *rounds, flush = course
    assert flush.first_step == sum(plan.inner_steps for plan in rounds) == 400
    assert len({plan.inner_steps for plan in rounds}) > 2
    for plan, after in pairwise(course):
        assert after.first_tick == plan.first_tick + plan.slots


def test_the_rank_follows_what_was_measured(tmp_path: Path) -> None:
    driver = Adaptive(
        tmp_path,
        outer={"method": "dilocox-paper", "rounds": 9, "inner_steps": 8, "fragments": 1},
        compression={"codec": "lowrank:16"},
        control={"adapt": "effective-rank", "window": 2},
    )
    driver.start()
    for round_ in range(5):
        ranks = {"a": 9_000 - 1_000 * round_, "b": 7_000 - 1_000 * round_}
        driver.rounds(
            round_, round_, **{site: measured(10**6, rank=rank) for site, rank in ranks.items()}
        )
    # Two rounds measured (8 and 7) by the plan of round 3; then 7 and 6.
    expected = [(8, "lowrank:16")] * 3 + [(4, "lowrank:8"), (4, "lowrank:7")]
    assert [driver.chosen(round_) for round_ in range(5)] == expected
    assert driver.core.state.plans[4].reason.startswith("effective rank 6.5 over the last 2")
    driver.core.close()


def test_a_coordinator_that_does_not_know_the_sizes_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the coordinator has no payload sizes"):
        Coordinator(run_config("ab", **LINK), tmp_path)


def test_a_run_goes_on_where_a_newer_version_knows_more_codecs(tmp_path: Path) -> None:
    """Its log has the menu of the version that it began with; the plan in force may be of that."""
    config = run_config("ab", **LINK)
    sizes = menu(config)
    older = {name: sizes[name] for name in ("none", "int8", "int4")} | {"topk:999": sizes["topk:9"]}
    Coordinator(config, tmp_path, RunStart(payloads=older)).close()
    for _ in range(2):
        Coordinator(config, tmp_path, RunStart(payloads=sizes)).close()
    core = Coordinator(config, tmp_path)
    assert core.state.payloads == {**sizes, "topk:999": sizes["topk:9"]}
    assert [type(event) for event in core.log.events()].count(Sized) == 2
    core.close()


PACED: dict[str, Any] = {"control": {"adapt": "off", "steps": "by-speed"}}


def steps_of(plan: m.RoundPlan) -> list[int]:
    return [member.steps(plan.inner_steps) for member in plan.members.values()]


def test_a_site_takes_as_many_steps_as_fit_its_speed(tmp_path: Path) -> None:
    driver = Adaptive(tmp_path, "abc", **{**PACED, "outer": {"rounds": 6, "inner_steps": 8}})
    driver.start()
    fast, slow = measured(10**6, step_us=100_000), measured(10**6, step_us=200_000)
    driver.rounds(0, 1, a=fast, b=fast, c=slow)
    assert [steps_of(plan) for plan in driver.plans] == [[8, 8, 8], [8, 8, 8]]
    driver.rounds(2, 4, a=fast, b=fast, c=slow)
    assert [steps_of(plan) for plan in driver.plans[2:]] == [[8, 8, 4]] * 3
    before = driver.core.state
    driver.reopen()
    assert driver.core.state == before == replayed(driver)
    # When the fast ones are gone, the slow one sets the pace.
    driver.leave("a")
    driver.leave("b")
    plan = driver.plan(5, "c")
    assert plan is not None
    assert steps_of(plan) == [8]
    driver.core.close()


def test_paces_of_a_resumed_run_are_those_of_the_first_course(tmp_path: Path) -> None:
    driver = Adaptive(tmp_path, **{**PACED, "outer": {"rounds": 8, "inner_steps": 8}})
    driver.start()
    own = [{"a": measured(10**6, 100_000), "b": measured(10**6, 150_000 + 90_000 * (r % 2))}
           for r in range(8)]  # fmt: skip
    for round_ in range(3):
        driver.rounds(round_, round_, **own[round_])
    plan = driver.plan(3, "a")
    assert plan is not None
    for site in "ab":
        driver.write_checkpoint(site, plan.first_tick + 1, 3, 1)
    for round_ in (3, 4, 5):
        driver.rounds(round_, round_, **own[round_])
    course = [driver.core.state.plans[round_].members for round_ in (3, 4, 5)]
    driver.core.resume()
    driver.start()
    for round_ in (3, 4, 5):
        driver.rounds(round_, round_, **own[round_])
    again = [driver.core.state.plans[round_].members for round_ in (3, 4, 5)]
    # Ranges differ: those of the abandoned course are not given out again.
    assert [[(o.pace, o.carry) for o in members.values()] for members in again] == [
        [(o.pace, o.carry) for o in members.values()] for members in course
    ]
    driver.core.close()


def test_declared_speeds_need_no_measuring(tmp_path: Path) -> None:
    config = {"outer": {"rounds": 5, "inner_steps": 8}, "control": {"adapt": "off"}}
    raw = run_config("ab", **config).model_dump(mode="json", exclude_none=True)
    raw["sites"] = {"a": {"speed": 100.0}, "b": {"speed": 25.0}}
    del raw["control"]["steps"]
    driver = Driver(tmp_path, resolve_run(raw))
    driver.start()
    plans = [driver.plan(round_, "a") for round_ in range(3)]
    assert [None if plan is None else steps_of(plan) for plan in plans] == [[8, 2]] * 3
    driver.core.close()


def test_a_slow_site_gives_exchanges_more_time_instead_of_the_round(tmp_path: Path) -> None:
    control = {"adapt": "link", "pinned": ["inner_steps", "codec"], "link": "80mbit"}
    outer = {"rounds": None, "steps": 400, "inner_steps": 20, "fragments": 4}
    found = []
    for slow in (100_000, 400_000):
        driver = Adaptive(tmp_path / str(slow), control=control, outer=outer)
        driver.start()
        driver.rounds(0, 3, a=measured(10**7, 100_000), b=measured(10**7, slow))
        plan = driver.core.state.plans[3]
        assert plan.estimate is not None
        # The round is as long as the fast site's steps.
        assert plan.estimate.step_us == 100_000
        found.append((plan.estimate.lag_us, plan.delay))
        driver.core.close()
    # And one step in sixteen for chance.
    assert found == [(0, 2), (300_000, 5)]
