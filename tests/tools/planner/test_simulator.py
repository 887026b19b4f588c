"""Simulated runs against times worked by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.support.planned_runs import FREE, KINDS, run

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.candidates import codecs
from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.controller.link_policy import choose
from dilocox.tools.planner.hardware_table import Host
from dilocox.tools.planner.payload_costs import PayloadCost
from dilocox.tools.planner.simulated_run import SimSite, SimulatedRun
from dilocox.tools.planner.simulator import SHARED_WORK, simulate

SIZE = 1000
RATE = 100.0
"""Bytes, and bytes per second: a payload of one fragment takes 10 s."""


def site(name: str, step: float = 1.0, **values: Any) -> SimSite:
    plain = SimSite(name=name, step=step, tokens=8, rate=RATE, rtt=0.0, host=FREE)
    return replace(plain, **values)


def menu(config: RunConfig, size: int = SIZE, values: int = 1) -> dict[str, Any]:
    row = [PayloadCost(size, values, size, 0) for _ in range(config.outer.pieces)]
    return {config.compression.codec: [row for _ in range(config.site.stages)]}


def fixed(**outer: Any) -> RunConfig:
    return run(outer={"steps": 10**6, **outer}, control={"adapt": "off"})


def play(config: RunConfig, *sites: SimSite, size: int = SIZE, rounds: int = 8) -> SimulatedRun:
    return simulate(config, list(sites), menu(config, size), rounds)


def round_seconds(course: SimulatedRun) -> list[float]:
    """From the end of a round to the end of the next, at the first site; the first is left out."""
    ends = [each.end for each in course.rounds[0]]
    return [b - a for a, b in pairwise(ends[1:])]


def test_factors_reach_their_owner_before_he_can_send() -> None:
    config = fixed(method="diloco", inner_steps=5)
    factors = {"none": [[PayloadCost(SIZE, 1, SIZE, 0, 300)]]}
    course = simulate(config, [site("a"), site("b")], factors, 8)
    assert round_seconds(course) == pytest.approx([5.0 + 3.0 + 10.0] * 6)


def test_without_overlap_every_round_waits_for_its_exchange() -> None:
    config = fixed(method="diloco", inner_steps=5)
    course = play(config, site("a"), site("b"))
    assert round_seconds(course) == pytest.approx([15.0] * 6)
    assert course.tokens_per_second == pytest.approx(2 * 8 * 5 / 15)
    assert course.waited_share == pytest.approx(10 / 15)
    # Three sites: two payloads in and out.
    three = play(config, site("a"), site("b"), site("c"))
    assert round_seconds(three) == pytest.approx([25.0] * 6)
    parts = fixed(method="diloco", inner_steps=5, exchange="reduce")
    four = play(parts, *(site(name) for name in "abcd"))
    # 2 x 3/4 of a payload.
    assert round_seconds(four) == pytest.approx([5 + 15.0] * 6)


def test_an_exchange_beside_a_round_is_hidden_if_it_fits() -> None:
    naive = {"method": "diloco", "overlap": "naive", "slots": 1, "delay": 1}
    hidden = play(fixed(**naive, inner_steps=20), site("a"), site("b"))
    assert round_seconds(hidden) == pytest.approx([20.0] * 6)
    assert hidden.waited_share == 0.0
    # Too short a round: it waits for the rest.
    waiting = play(fixed(**naive, inner_steps=6), site("a"), site("b"))
    assert round_seconds(waiting) == pytest.approx([10.0] * 6)
    assert waiting.waited_share == pytest.approx(0.4)


def test_a_staggered_fragment_lands_when_its_delay_is_over() -> None:
    # Four fragments of 10 s each, boundaries every 12 s: a delay of 10 s is just enough.
    keep = {"method": "dilocox", "inner_steps": 48, "slots": 48, "fragments": 4}
    enough = play(fixed(**keep, delay=10), site("a"), site("b"))
    assert round_seconds(enough) == pytest.approx([48.0] * 6)
    tight = play(fixed(**keep, delay=7), site("a"), site("b"))
    # Each landing waits 3 s.
    assert round_seconds(tight) == pytest.approx([48.0 + 4 * 3] * 6)


def test_stages_share_the_link() -> None:
    config = run(
        site={"stages": 2},
        outer={"steps": 10**6, "method": "diloco", "inner_steps": 5},
        control={"adapt": "off"},
    )
    # Boundaries of both stages at the round's end, 20 s of transfers on one link.
    assert round_seconds(play(config, site("a"), site("b"))) == pytest.approx([25.0] * 6)


def test_synchronous_steps_by_hand() -> None:
    config = fixed(method="allreduce", inner_steps=4)
    course = play(config, site("a"), site("b"))
    # Every step waits for its own exchange.
    assert round_seconds(course) == pytest.approx([4 * 11.0] * 6)
    late = run(outer={"steps": 10**6, "method": "cocktailsgd", "inner_steps": 4})
    # One step late: the exchange of a step goes on beside the next one.
    assert round_seconds(play(late, site("a"), site("b"))) == pytest.approx([4 * 10.0] * 6)
    assert round_seconds(play(late, site("a"), site("b"), size=50)) == pytest.approx([4.0] * 6)


def test_the_slowest_site_and_the_narrowest_link_set_the_pace() -> None:
    config = fixed(method="diloco", inner_steps=5)
    course = play(config, site("a"), site("b", step=3.0))
    assert round_seconds(course) == pytest.approx([25.0] * 6)
    assert course.waited_share_of(0) == pytest.approx(20 / 25)
    assert course.waited_share_of(1) == pytest.approx(10 / 25)
    narrow = play(config, site("a"), site("b", rate=RATE / 4))
    assert round_seconds(narrow) == pytest.approx([45.0] * 6)
    pair = simulate(config, [site("a"), site("b"), site("c")], menu(config), 8, pair_rate=25.0)
    # One path of 25 B/s between two of three sites carries one payload of 10 s at 100 B/s.
    assert round_seconds(pair) == pytest.approx([5 + 40.0] * 6)


def test_sites_take_steps_by_their_declared_speed() -> None:
    config = run(
        outer={"steps": 10**6, "method": "diloco", "inner_steps": 5},
        control={"adapt": "off"},
        sites={"a": {"speed": 1.0}, "b": {"speed": 0.5}},
    )
    course = play(config, site("a"), site("b", step=2.0))
    # Half of five steps: two, and the half that is left makes it three in the next round.
    assert [each.steps for each in course.rounds[0]] == [5] * 8
    assert [each.steps for each in course.rounds[1]] == [2, 3] * 4
    # Three steps of 2 s end after the other's five; then 10 s of transfers.
    assert round_seconds(course) == pytest.approx([15, 16] * 3)


def test_speeds_that_are_not_declared_are_measured() -> None:
    config = run(
        outer={"steps": 10**6, "method": "diloco", "inner_steps": 4},
        control={"adapt": "off", "steps": "by-speed"},
    )
    course = play(config, site("lyon"), site("paris", step=2.0))
    # A plan knows of the round before the last: the third is the first one that does.
    assert [each.steps for each in course.rounds[1]] == [4, 4, 2, 2, 2, 2, 2, 2]
    assert course.rounds[1][-1].waited == pytest.approx(10.0)
    assert course.rounds[0][-1].waited == pytest.approx(10.0)


def test_work_and_round_trips_are_on_the_way() -> None:
    config = fixed(method="diloco", inner_steps=5)
    slow = Host(**{**vars(FREE), "encode": dict.fromkeys(KINDS, 4.0), "decode":
                   dict.fromkeys(KINDS, 2.0), "outer": 0.5, "exchange": 0.25})  # fmt: skip
    course = play(config, site("a", host=slow, rtt=0.5), site("b"))
    # One value: encoded in 1 s, two payloads decoded in 2 s each; two round trips; a quarter of a
    # second to begin and one to land, in the training's thread; 0.25 s beside all that.
    assert round_seconds(course) == pytest.approx([5 + 10 + 1 + 4 + 1 + 0.25 + 0.5] * 6)


def test_the_next_exchange_is_encoded_while_one_travels() -> None:
    # Nothing to compute, four fragments: encoded in 4 s, 10 s on the link, decoded in 2 x 2 s.
    keep = {"method": "dilocox", "inner_steps": 4, "slots": 4, "fragments": 4, "delay": 4}
    slow = Host(**{**vars(FREE), "encode": dict.fromkeys(KINDS, 1.0), "decode":
                   dict.fromkeys(KINDS, 2.0)})  # fmt: skip
    config = fixed(**keep)
    sites = [site(name, step=1e-6, host=slow) for name in "ab"]
    for threads, seconds in ((1, 4 * 18.0), (2, 4 * 10.0)):
        course = simulate(config, sites, menu(config), 8, at_once=threads)
        assert round_seconds(course)[2:] == pytest.approx([seconds] * 4, rel=1e-3)


def test_shared_cores_pay_for_the_exchanges_work() -> None:
    naive = {"method": "diloco", "overlap": "naive", "slots": 1, "delay": 1, "inner_steps": 20}
    busy = Host(**{**vars(FREE), "exchange_cpu": 0.5})
    course = play(fixed(**naive), site("a", host=busy, cores=0.5), site("b", host=busy, cores=0.5))
    assert round_seconds(course) == pytest.approx([21.0] * 6)
    assert course.rounds[0][-1].work == pytest.approx(0.0, abs=1e-9)
    outer = Host(**{**vars(FREE), "outer": 2.0})
    slower = play(
        fixed(**naive), site("a", host=outer, cores=0.5), site("b", host=outer, cores=0.5)
    )
    # Boundary and landing, a second each of one core, on half a core: and they count as work.
    assert round_seconds(slower) == pytest.approx([24.0] * 6)
    # They take more processor time than on a core of its own, and the site gets half a second of it
    # in a second.
    assert slower.rounds[0][-1].work == pytest.approx(2.0 * SHARED_WORK / 0.5)
    wide = play(fixed(**naive), site("a", host=outer, cores=4.0), site("b", host=outer, cores=4.0))
    assert wide.rounds[0][-1].work == pytest.approx(2.0 * SHARED_WORK)
    free = play(fixed(**naive), site("a", host=busy), site("b", host=busy))
    assert round_seconds(free) == pytest.approx([20.0] * 6)


def test_a_site_alone_exchanges_nothing() -> None:
    course = play(fixed(method="diloco", inner_steps=5), site("a"))
    assert round_seconds(course) == pytest.approx([5.0] * 6)
    assert course.rounds[0][0].received == 0


def test_the_run_ends_with_its_steps() -> None:
    config = run(
        outer={"steps": 12, "method": "diloco", "inner_steps": 5}, control={"adapt": "off"}
    )
    course = play(config, site("a"), site("b"))
    assert [each.steps for each in course.rounds[0]] == [5, 5, 2]


def test_plans_are_the_controllers() -> None:
    config = run(outer={"steps": 4000})
    sizes = {"none": 8000, "int8": 2000, "int4": 1000, "int2": 500}
    menus: dict[str, Any] = {}
    for codec in codecs(config):
        kept = int(codec.partition(":")[2] or 0)
        size = sizes.get(codec, max(8, kept))
        menus[codec] = [[PayloadCost(size, 1, size, 0) for _ in range(4)]]
    course = simulate(config, [site("a"), site("b")], menus, 10)
    assert course.choices[0].reason == course.choices[1].reason == "nothing is measured yet"
    final = course.choices[-1]
    plain = {
        codec: [[each.payload for each in row] for row in rows] for codec, rows in menus.items()
    }
    # What it settles on is what the controller says of the true link and step.
    expected = choose(config, plain, Estimate(1_000_000, int(RATE), 0, 0), 2, None)
    assert (final.inner_steps, final.codec) == (expected.inner_steps, expected.codec)
    assert course.settled() < 9
    assert course.waited_share == pytest.approx(0.0, abs=0.01)


def test_pieces_are_exchanged_as_the_plan_has_them() -> None:
    """Where headers are most of it, all four travel as one."""
    config = run(outer={"steps": 4000})
    menus = {codec: [[PayloadCost(65, 1, 65, 0) for _ in range(4)]] for codec in codecs(config)}
    course = simulate(config, [site("a"), site("b")], menus, 10)
    final = course.choices[-1]
    assert final.fragments == 1
    assert {each.fragments for each in course.choices[:2]} == {4}
    sample = course.samples[9]["a"]
    assert (sample.exchanges, sample.exchange_bytes) == (1, 4 * 65 - 3 * 64)
    assert course.waited_share == pytest.approx(0.0, abs=0.01)


def test_nobody_begins_a_round_before_all_are_through_with_the_one_before_the_last() -> None:
    naive = {"method": "diloco", "overlap": "naive", "slots": 1, "delay": 1, "inner_steps": 5}
    course = play(fixed(**naive), site("a"), site("b", step=4.0), size=1)
    for number in range(2, 8):
        assert course.rounds[0][number].start >= course.rounds[1][number - 2].end
