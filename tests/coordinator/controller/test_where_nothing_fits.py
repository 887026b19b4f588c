"""Where no plan is all that is asked of one: what is given up, and that it comes to rest."""

from __future__ import annotations

import random

import pytest

from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.controller.link_policy import choose
from tests.support.controller_inputs import Play, at, chosen, menu, run_config


def test_nothing_hides_on_a_link_that_is_far_too_slow() -> None:
    config = run_config()
    few = choose(config, menu(config), at(60), 2, None)
    assert few.inner_steps > 600 // 8
    assert few.reason.endswith("; fewer than 8 rounds, for nothing else hides")
    choice = choose(config, menu(config), at(1), 2, None)
    # Two rounds at least, and next to the fewest bytes per inner step that there are.
    assert (choice.inner_steps, choice.codec) == (200, "top1:2200")
    assert choice.delay == choice.slots
    assert choice.reason.startswith("nothing hides on this link, the least lossy of the fastest: ")
    assert "\n" not in choice.reason


def test_where_nothing_hides_bytes_that_cost_nothing_are_not_saved() -> None:
    """131 ms beside the bytes of each exchange, steps of .37 ms: every codec takes that long."""
    config = run_config(steps=400, outer={"fragments": 4})
    far = Estimate(370, 125_000_000, 0, 0, overhead_us=131_072)
    choice = choose(config, menu(config, 100_000), far, 2, None)
    assert choice.reason.startswith("nothing hides on this link")
    assert choice.codec in ("none", "int8")


GIVEN_UP = ("fewer than 8 rounds", "nothing hides", "more than asked for")


@pytest.mark.parametrize("seed", range(12))
def test_it_comes_to_rest_where_nothing_fits(seed: int) -> None:
    """Links that are too slow, exchanges that take seconds beside their bytes, work that is never
    little enough; all of it within 10 %, up or down."""
    draw = random.Random(seed)
    way = GIVEN_UP[seed % 3]
    rate = 10 ** (draw.uniform(1.6, 2.0) if way == GIVEN_UP[0] else draw.uniform(0.5, 1.2))
    rate = 10 ** draw.uniform(4, 6) if way == GIVEN_UP[2] else rate
    beside_us, work_us = draw.choice([0.0, 2e5, 1e6]), draw.uniform(1e3, 1e5)
    work = 1e-6 if way == GIVEN_UP[2] else 1.0

    def noisy(value: float) -> float:
        return value * draw.uniform(0.9, 1.1)

    play = Play(
        run_config(control={"work": work}),
        lambda _: noisy(rate),
        lambda _: noisy(100_000),
        beside_us=lambda _: noisy(beside_us),
        work_us=lambda codec: noisy(work_us * (1 + codec.startswith("top"))),
    )
    choices = play.run(30)
    # A plan in force may use up what new ones leave free, and is said to hide then.
    assert any(way in choice.reason for choice in choices[2:])
    assert len({chosen(choice) for choice in choices[14:]}) == 1
