"""Inner steps of sites of unequal speed, and their weights, against numbers worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.coordinator.controller.pace import (
    declared_paces,
    limited,
    measured_paces,
    rounds_looked_at,
    site_weights,
)
from dilocox.coordinator.protocol.step_share import FULL, carried, step_within, steps_taken

paces = st.integers(1, 2500)
carries = st.integers(0, 999)


def test_paces_are_speeds_over_the_middle_site_s_of_three_or_more() -> None:
    times = {"a": [100] * 3, "b": [125] * 3, "c": [200] * 3, "d": [400] * 3, "e": [129] * 3}
    expected = {"a": 1290, "b": 1000, "c": 640, "d": 320, "e": 1000}
    assert measured_paces(times, {}) == expected
    del times["e"]  # of four the second fastest
    assert measured_paces(times, {}) == {"a": 1250, "b": 1000, "c": 620, "d": 310}
    three = {"a": [100] * 3, "b": [300] * 3, "c": [300] * 3}
    assert measured_paces(three, {"a": 2500}) == {"a": 3000, "b": 1000, "c": 1000}


def test_a_pace_above_the_typical_one_s_rises_by_half_a_round() -> None:
    times, in_force, course = {"a": [100] * 9, "b": [300] * 9, "c": [300] * 9}, {"a": 1000}, []
    for _ in range(4):
        in_force = measured_paces(times, in_force)
        course.append(in_force["a"])
    assert course == [1500, 2250, 3000, 3000]
    # Down to what it is, and up to the typical one's, a site comes at once.
    assert measured_paces({**times, "a": [300] * 9}, {"a": 3000})["a"] == 1000
    assert measured_paces({**times, "a": [300] * 9}, {"a": 250})["a"] == 1000


def test_of_two_sites_paces_are_speeds_over_the_faster_one_s() -> None:
    assert measured_paces({"a": [100] * 3, "b": [400] * 3}, {}) == {"a": 1000, "b": 250}
    # Where the third has measured nothing yet, two are known.
    assert measured_paces({"a": [100] * 3, "b": [400] * 3, "c": []}, {})["b"] == 250


def test_declared_speeds_are_over_the_fastest_one_s() -> None:
    assert declared_paces({"a": 8.0, "b": 6.4, "c": 4.0, "d": 2.0}) == {
        "a": 1000, "b": 800, "c": 500, "d": 250,
    }  # fmt: skip


def test_one_disturbed_round_changes_nothing_and_two_do() -> None:
    assert measured_paces({"a": [100] * 3, "b": [200, 200, 900]}, {"b": 500})["b"] == 500
    assert measured_paces({"a": [100] * 3, "b": [200, 400, 400]}, {"b": 500})["b"] == 250


def test_short_rounds_are_looked_at_for_a_minute() -> None:
    # A minute has 24 rounds of 25 steps of 100 ms; the longest are looked at three at a time.
    assert rounds_looked_at(25, 100_000) == 24
    assert rounds_looked_at(500, 2_000_000) == 3
    assert rounds_looked_at(1, 1_000) == 40


def test_machines_that_are_busy_now_and_then_keep_their_steps() -> None:
    """Two equal machines, each of which is a third slower for three rounds of ten: as three rounds
    in a row see it, one of them is slow most of the time."""
    steps = [[130, 130, 130, *[100] * 7], [*[100] * 5, 130, 130, 130, 100, 100]]
    times = {name: row * 3 for name, row in zip("ab", steps, strict=True)}
    in_force: dict[str, int] = {}
    for end in range(1, 30):
        heard = {name: row[:end] for name, row in times.items()}
        in_force = measured_paces(heard, in_force, rounds=24)
        assert in_force == {"a": 1000, "b": 1000}, end


def test_the_first_rounds_only_tell_slow_sites_from_fast_ones() -> None:
    assert measured_paces({"a": [100, 100], "b": [120, 120]}, {})["b"] == 1000
    assert measured_paces({"a": [100, 100], "b": [200, 200]}, {})["b"] == 500
    assert measured_paces({"a": [100] * 3, "b": [120] * 3}, {})["b"] == 830
    assert measured_paces({"a": [100] * 7, "b": [120] * 7}, {}, rounds=24)["b"] == 1000
    assert measured_paces({"a": [100] * 8, "b": [120] * 8}, {}, rounds=24)["b"] == 830
    # One that was found in long rounds stays when rounds get short, and more of them count.
    assert measured_paces({"a": [100] * 4, "b": [120] * 4}, {"b": 830}, rounds=24)["b"] == 830


def test_who_has_just_come_is_not_what_the_others_are_measured_by() -> None:
    # It may have waited for most of what it takes for its first round, or come in its middle.
    found = measured_paces({"a": [100] * 9, "b": [100] * 9, "new": [1]}, {})
    assert found == {"a": 1000, "b": 1000, "new": 1000}
    assert measured_paces({"a": [100] * 9, "new": [50, 50, 50]}, {})["a"] == 500
    # Of one site and newcomers nobody is believed alone.
    found = measured_paces({"m": [1] * 9, "a": [100], "b": [100]}, {"m": 7000}, most=8.0)
    assert found == {"m": 8000, "a": 1000, "b": 1000}


def test_nobody_is_given_more_steps_before_three_rounds_are_measured() -> None:
    times = {"a": [100] * 2, "b": [100] * 2, "m": [20] * 2}
    assert measured_paces(times, {}) == {"a": 1000, "b": 1000, "m": 1000}
    assert measured_paces({site: row * 2 for site, row in times.items()}, {})["m"] == 1500
    # As with slow ones, what differs little is chance until eight rounds are measured.
    for rounds, pace in ((7, 1000), (8, 1250)):
        row = {"a": [100] * rounds, "b": [100] * rounds, "c": [80] * rounds}
        assert measured_paces(row, {}, rounds=24)["c"] == pace


@given(
    honest=st.lists(st.integers(100, 700), min_size=2, max_size=6),
    claims=st.lists(st.integers(0, 2**53), min_size=1, max_size=5),
)
def test_no_minority_takes_steps_from_the_others(honest: list[int], claims: list[int]) -> None:
    """Whatever they claim, every honest site has as many steps of a round as where the fastest
    honest site counts for typical; equal sites all of them."""
    claims = claims[: len(honest) - 1]
    times = {f"honest{n}": [time] * 8 for n, time in enumerate(honest)}
    times |= {f"claims{n}": [time] * 8 for n, time in enumerate(claims)}
    found = measured_paces(times, {}, most=8.0)
    for number, time in enumerate(honest):
        least = FULL * min(honest) // time
        assert found[f"honest{number}"] >= least // 10 * 10
        if len(set(honest)) == 1:
            assert found[f"honest{number}"] == FULL
    assert max(found.values()) <= 8 * FULL


def test_a_pace_in_force_stays_while_measurements_are_near() -> None:
    for step, pace in ((200, 500), (203, 500), (192, 500), (206, 480), (188, 530)):
        assert measured_paces({"a": [100], "b": [step]}, {"a": 1000, "b": 500})["b"] == pace, step
    for step, pace in ((100, 2000), (101, 2000), (96, 2000), (103, 1940), (94, 2120)):
        three = {"a": [200] * 3, "b": [200] * 3, "c": [step] * 3}
        assert measured_paces(three, {"c": 2000})["c"] == pace, step
    # What counts as equal is equal, whatever was in force.
    assert measured_paces({"a": [100], "b": [102]}, {"a": 1000, "b": 940})["b"] == 1000


def test_who_has_not_measured_keeps_its_pace_or_is_taken_for_fast() -> None:
    found = measured_paces({"a": [100], "b": [], "c": []}, {"a": 1000, "b": 400})
    assert found == {"a": 1000, "b": 400, "c": 1000}


def test_steps_by_hand() -> None:
    # 0.4 of the fastest's 5 steps: 2; of 7 it is 2.8, and the 0.8 is carried on.
    assert [steps_taken(400, 0, count) for count in range(6)] == [0, 0, 0, 1, 1, 2]
    assert carried(400, 0, 5) == (0, 0)
    assert carried(400, 0, 7) == (0, 800)
    assert steps_taken(400, 800, 7) == 3
    assert [step_within(400, 0, number) for number in (0, 1)] == [2, 4]
    assert [step_within(1000, 0, number) for number in range(3)] == [0, 1, 2]
    # Too slow for a whole step in three: it takes one, at the round's end.
    assert carried(250, 0, 3) == (250, 0)
    assert [steps_taken(250, 250, count) for count in range(4)] == [0, 0, 0, 1]


@given(pace=paces, rounds=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_over_many_rounds_a_site_trains_in_proportion(pace: int, rounds: list[int]) -> None:
    carry = taken = waited_for = 0
    for inner_steps in rounds:
        used, left = carried(pace, carry, inner_steps)
        waited_for += used - carry
        taken += steps_taken(pace, used, inner_steps)
        assert steps_taken(pace, used, 0) == 0
        assert steps_taken(pace, used, inner_steps) >= 1
        assert 0 <= left < 1000
        carry = left
    assert 1000 * taken + carry == pace * sum(rounds) + waited_for


@given(pace=paces, carry=carries, count=st.integers(1, 60))
def test_a_step_ends_with_the_one_it_is_said_to_end_with(pace: int, carry: int, count: int) -> None:
    for number in range(steps_taken(pace, carry, count)):
        at = step_within(pace, carry, number)
        assert steps_taken(pace, carry, at) <= number < steps_taken(pace, carry, at + 1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # b = 8, 8, 4; b p = 8, 4, 1; b / p = 8, 16, 16; each over its mean.
        ("equal", [1.2, 1.2, 0.6]),
        ("tokens", [24 / 13, 12 / 13, 3 / 13]),
        ("fednova", [0.6, 1.2, 1.2]),
    ],
)
def test_weights_by_hand(rule: str, expected: list[float]) -> None:
    found = site_weights(rule, {"a": 8, "b": 8, "c": 4}, {"a": 1000, "b": 500, "c": 250})
    assert list(found.values()) == pytest.approx(expected)


@pytest.mark.parametrize(("rule", "share"), [("tokens", 0.2), ("fednova", 5.0), ("equal", 1.0)])
def test_a_site_that_is_too_slow_for_a_step_counts_by_the_step_it_takes(
    rule: str, share: float
) -> None:
    """At a tenth of the speed in rounds of five steps it takes one, as at a fifth."""
    batches, paces = {"a": 8, "b": 8}, {"a": 1000, "b": 100}
    assert carried(100, 0, 5)[0] == FULL - 500  # it takes one, and is waited for
    found = site_weights(rule, batches, paces, 5)
    assert found["b"] / found["a"] == pytest.approx(share)


def test_fednova_averages_displacements_per_step() -> None:
    # Displacements of 3 per step and 1 per step, over 4 and 1 steps: the mean per step is 2, over
    # the harmonic mean of the steps, 1.6.
    weights = site_weights("fednova", {"a": 8, "b": 8}, {"a": 1000, "b": 250})
    mean = (weights["a"] * 12 + weights["b"] * 1) / sum(weights.values())
    assert mean == pytest.approx(2 * 1.6)


@given(
    rule=st.sampled_from(["equal", "tokens", "fednova"]),
    sites=st.lists(st.tuples(st.integers(1, 64), paces), min_size=1, max_size=6),
)
def test_weights_have_a_mean_of_one(rule: str, sites: list[tuple[int, int]]) -> None:
    batches = {str(n): batch for n, (batch, _) in enumerate(sites)}
    found = site_weights(rule, batches, {str(n): pace for n, (_, pace) in enumerate(sites)})
    assert sum(found.values()) == pytest.approx(len(sites))
    assert min(found.values()) > 0


def test_nobody_is_faster_than_the_others_median_allows() -> None:
    """m says that a step takes it 1 us: it has to take eight times the others' steps."""
    times = {**dict.fromkeys("abc", [100_000] * 3), "m": [1] * 3}
    found = measured_paces(times, {"m": 7000}, most=8.0)
    assert found == {"a": 1000, "b": 1000, "c": 1000, "m": 8000}
    assert measured_paces({"a": [100_000] * 3, "m": [1] * 3}, {}, most=8.0)["a"] == 120
    honest = {"a": [100] * 3, "b": [200] * 3, "c": [700] * 3}
    assert measured_paces(honest, {}, most=8.0) == measured_paces(honest, {})
    assert measured_paces({"a": [100] * 3}, {}, most=8.0) == {"a": 1000}


def test_a_measured_speed_gives_no_more_than_the_limit() -> None:
    batches = dict.fromkeys("abcm", 8)
    raw = site_weights("tokens", batches, {"a": 1000, "b": 1000, "c": 1000, "m": 8000})
    assert raw["m"] > 2.9
    found = limited(raw, batches, 0.5)
    assert found["m"] == pytest.approx(2.0)
    assert found["a"] == pytest.approx(2.0 / 3)
    assert sum(found.values()) == pytest.approx(4.0)
    # By batch alone, which the run file has, a site may have more; of two, one has half or more.
    wide = {"a": 1, "b": 1, "m": 8}
    equal = site_weights("equal", wide, dict.fromkeys("abm", 1000))
    assert limited(equal, wide, 0.5) == equal
    two = {"a": 0.2, "m": 1.8}
    assert limited(two, {"a": 8, "m": 8}, 0.5) == two
