"""What sites say of their steps, against the coordinator's own clock.

Sites are played on a clock of their own: they train, exchange and wait as real ones do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.step_clock import expected, least_step
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits

Steps = Iterator[float]
"""A process: the seconds that pass until it goes on."""
ROUNDS = 8


class Course:
    """Sites with true step times that train to the end of a run."""

    def __init__(
        self,
        folder: Path,
        steps: dict[str, float],
        lies: dict[str, int],
        *,
        transfer: float = 0.5,
        latency: float = 0.1,
        **sections: Any,
    ) -> None:
        outer = {"rounds": ROUNDS, "inner_steps": 20, **sections.pop("outer", {})}
        control = {"steps": "by-speed", **sections.pop("control", {})}
        config = run_config("".join(steps), outer=outer, control=control, **sections)
        self.driver = Driver(folder, config)
        self.driver.start()
        self.steps, self.lies = steps, lies
        self.transfer, self.latency = transfer, latency
        self.random = random.Random(7)
        self.landed: dict[tuple[str, str], float] = {}
        self.said: dict[tuple[str, int], int] = {}
        self.processes: list[tuple[float, Steps]] = [
            (self.now, self._train(name)) for name in steps
        ]
        while self.processes:
            self.processes.sort(key=lambda item: item[0])
            when, process = self.processes.pop(0)
            while self.now + 1.0 < when:  # a longer pause counts as the coordinator's own
                self.driver.clock.time += 1.0
                self.driver.core.steps.look(self.now, 2.5)
            self.driver.clock.time = max(self.now, when)
            for pause in process:
                self.processes.append((self.now + pause, process))
                break
            self.driver.core.steps.look(self.now, 2.5)

    @property
    def now(self) -> float:
        return self.driver.clock.time

    def _some(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.9, 1.1)

    def _train(self, name: str) -> Steps:
        owed: list[tuple[int, str]] = []
        round_ = 0
        while True:
            while (plan := self.driver.plan(round_, name)) is None:
                yield 0.05
            if plan.kind == "flush":
                return
            yield self._some(self.latency)
            member, began, waited = plan.members[name], self.now, 0.0
            length = plan.inner_steps // plan.slots
            slots = boundary_slots(0, 1, plan.fragments, plan.slots)
            for slot in range(1, plan.slots + 1):
                count = member.steps(slot * length) - member.steps((slot - 1) * length)
                yield self._some(count * self.steps[name])
                tick = plan.first_tick + slot
                for fragment in [number for number, due in enumerate(slots) if due == slot]:
                    key = m.ExchangeKey.outer(round_, 0, fragment)
                    self.processes.append((self.now, self._exchange(name, key, plan)))
                    owed.append((tick + plan.delay, key.text))
                since = self.now
                while any((name, key) not in self.landed for due, key in owed if due <= tick):
                    yield 0.05
                waited += self.now - since
                owed = [item for item in owed if item[0] > tick]
            alone = (self.now - began - waited) / plan.steps_of(name)
            self.said[name, round_] = self.lies.get(name, max(1, round(alone * 1e6)))
            said = m.Measured(
                step_us=self.said[name, round_], exchange_bytes=1, exchange_us=1, exchanges=1
            )
            self.driver.round_done(name, round_, said)
            pause = 12.0 if plan.checkpoint else 0.0
            pause += 20.0 if plan.evaluate and next(iter(plan.members)) == name else 0.0
            yield self._some(self.latency) + pause  # it accounts, and perhaps writes or evaluates
            round_ += 1

    def _exchange(self, name: str, key: m.ExchangeKey, plan: m.RoundPlan) -> Steps:
        yield self._some(self.latency)
        self.driver.begin(key, name)
        while {site for site, _ in self.driver.core.arrivals.present(key.text)} != set(self.steps):
            yield 0.05
        yield self._some(self.transfer)
        self.driver.vote(key, name, held=list(self.steps))
        while self.driver.core.state.exchanges[key.text].decision is None:
            yield 0.05
        yield self._some(self.latency)
        self.landed[name, key.text] = self.now

    def corrected(self) -> list[e.Clocked]:
        """What the clock has corrected."""
        return [item for item in self.driver.core.log.events() if isinstance(item, e.Clocked)]


def test_evidence_bounds_a_step_from_below() -> None:
    # 10 steps from 0 s on, the last 4 of them after a decision at 7 s.
    evidence = [(0.0, 10), (7.0, 4)]
    assert expected(evidence, 1_000_000) == 11.0
    assert expected(evidence, 100_000) == 7.4
    assert least_step(evidence, 11.0) == 1_000_000
    assert least_step(evidence, 8.0) == 250_000
    assert least_step(evidence, 7.0) == 0
    assert least_step([(0.0, 10), (8.0, 0)], 7.5) == 0
    assert least_step([(0.0, 0)], 7.5) == 0


@pytest.mark.parametrize(
    "outer",
    [
        {"fragments": 1, "overlap": "none", "slots": 1},
        {"fragments": 2, "overlap": "none", "slots": 4},
        {"fragments": 2, "delay": 2, "slots": 10},
        {"fragments": 1, "delay": 10, "slots": 10},
    ],
)
@pytest.mark.parametrize("sites", [{"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.1, "c": 0.9, "d": 0.5}])
@pytest.mark.parametrize("transfer", [0.5, 9.0])
def test_what_honest_sites_say_stays(
    tmp_path: Path, outer: dict[str, Any], sites: dict[str, float], transfer: float
) -> None:
    """Fast, slow and equal sites; links that keep everybody waiting; pauses between rounds."""
    course = Course(
        tmp_path,
        sites,
        {},
        transfer=transfer,
        outer=outer,
        checkpoint={"every_rounds": 3},
        evaluation={"every_rounds": 2},
    )
    assert course.corrected() == []
    for round_, known in course.driver.core.state.measured.items():
        assert {s: own.step_us for s, own in known.items()} == {
            site: course.said[site, round_] for site in sites
        }
    course.driver.core.close()


@pytest.mark.parametrize(
    "outer",
    [
        {"fragments": 1, "overlap": "none", "slots": 1},
        {"fragments": 2, "delay": 2, "slots": 10},
        {"fragments": 1, "delay": 10, "slots": 10},
    ],
)
@pytest.mark.parametrize("sites", ["am", "abcm"])
def test_who_says_1_us_is_believed_what_the_clock_says(
    tmp_path: Path, outer: dict[str, Any], sites: str
) -> None:
    course = Course(tmp_path, dict.fromkeys(sites, 1.0), {"m": 1}, outer=outer)
    state = course.driver.core.state
    assert {event.site for event in course.corrected()} == {"m"}
    believed = [event.step_us for event in course.corrected()]
    assert len(believed) >= ROUNDS - 4
    assert all(800_000 <= step_us <= 1_050_000 for step_us in believed)
    last = state.plans[ROUNDS - 1]
    paces = {site: own.pace for site, own in last.members.items()}
    # A step takes each site 10 % more or less, by chance.
    least = 700 if len(sites) == 2 else 900
    assert all(least <= paces[site] <= 1000 for site in sites[:-1])
    assert 1000 <= paces["m"] <= 1250
    told = [text for *_, text in state.feed if "coordinator's clock" in text]
    assert len(told) == 1
    assert "m says that an inner step of round 1 took it 0.001 ms; by the coordinator's" in told[0]
    assert replayed(course.driver) == state
    course.driver.core.close()


def test_who_says_years_is_believed_what_the_round_took(tmp_path: Path) -> None:
    """A step time that is too long makes the link seem fast and rounds short."""
    course = Course(tmp_path, dict.fromkeys("abm", 1.0), {"m": 2**53}, outer={"fragments": 1})
    found = course.corrected()
    assert {event.site for event in found} == {"m"}
    assert all(1_000_000 <= event.step_us <= 5_000_000 for event in found)
    course.driver.core.close()


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("inner_steps", [10, 60])
def test_who_claims_speed_takes_no_step_from_the_others(
    tmp_path: Path, inner_steps: int, trains: bool
) -> None:
    """m says 1 us, and trains what it is given for that, or comes to its exchanges at once."""
    steps = dict.fromkeys("abcm", 0.04)
    outer = {"inner_steps": inner_steps}
    short: dict[str, Any] = {"latency": 0.02, "transfer": 0.05, "outer": outer}
    honest = Course(tmp_path / "honest", steps, {}, **short)
    false = steps if trains else {**steps, "m": 1e-5}
    lying = Course(tmp_path / "lying", false, {"m": 1}, **short)
    trained = []
    for course in (honest, lying):
        plans = [plan for plan in course.driver.core.state.plans.values() if plan.kind == "train"]
        trained.append([[plan.steps_of(site) for site in "abc"] for plan in plans])
        shares = [plan.members["m"].weight / len(steps) for plan in plans]
        assert max(shares) <= 0.5
        course.driver.core.close()
    assert trained[0] == trained[1] == [[inner_steps] * 3] * ROUNDS


def test_a_very_slow_site_may_take_no_step_after_what_is_known(tmp_path: Path) -> None:
    """a, which evaluates every round, is timed from its first exchange of the round on; so is b,
    which takes its one step of the round before that."""
    outer, evaluation = {"inner_steps": 8}, {"every_rounds": 1}
    course = Course(tmp_path, {"a": 0.001, "b": 1.0}, {}, outer=outer, evaluation=evaluation)
    assert course.corrected() == []
    course.driver.core.close()


def test_in_rounds_shorter_than_a_beat_a_lie_is_bounded_and_the_truth_stays(
    tmp_path: Path,
) -> None:
    steps = dict.fromkeys("abcd", 0.04)
    short: dict[str, Any] = {"latency": 0.01, "transfer": 0.02}
    honest = Course(tmp_path / "honest", steps, {}, **short)
    beat = Timeouts.derive(honest.driver.core.state.config.network).beat
    assert honest.driver.core.state.plans[1].inner_steps * 0.04 < beat
    assert honest.corrected() == []
    honest.driver.core.close()
    lying = Course(tmp_path / "lying", steps, {"d": 1}, **short)
    found = lying.corrected()
    assert {event.site for event in found} == {"d"}
    assert all(event.step_us > 10_000 for event in found), found
    lying.driver.core.close()
