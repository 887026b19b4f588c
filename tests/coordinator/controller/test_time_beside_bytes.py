"""The controller where much of a swap's time does not hang on its bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from dilocox.config.codec_spec import parse_spec
from dilocox.coordinator.controller.candidates import candidate
from tests.support.controller_inputs import Play, chosen, menu, run_config


@pytest.mark.parametrize("noise_share", [0.05, 0.2])
@pytest.mark.parametrize("seed", range(6))
def test_a_time_that_bytes_hardly_change_is_not_taken_for_a_slow_link(
    seed: int, noise_share: float
) -> None:
    """80 ms a swap whatever it carries over 10 Gbit/s: fewer bytes buy nothing, and must not
    follow each other down to the last codec."""
    draw = random.Random(seed)
    busy = [draw.uniform(1 - noise_share, 1 + noise_share) for _ in range(60)]
    play = Play(
        run_config(outer={"inner_steps": 2}),
        lambda t: 1.25e9 / busy[t],
        constant_us=lambda t: 80_000 * busy[t],
    )
    play.menu = menu(play.config, 3_000_000)
    specs = [parse_spec(choice.codec) for choice in play.run(60)[20:]]
    kept = [spec.number if spec.kind == "topk" else 4096 for spec in specs]
    assert min(kept) >= 20
    assert play.estimate is not None
    assert play.estimate.rate >= 1e6


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_short_rounds_that_could_not_hide_are_not_tried_again_and_again(seed: int) -> None:
    """50 ms a swap, whatever it carries, over 1.3 Gbit/s: rounds of two steps just do not hide
    their four, and a swap measured a little short must not make them look as if they did."""
    draw = random.Random(seed)
    noise = [[draw.uniform(0.95, 1.05) for _ in range(4)] for _ in range(200)]
    play = Play(
        run_config(steps=20_000, outer={"fragments": 4}),
        lambda t: 167e6 * noise[t][0],
        lambda t: 100_000 * noise[t][1],
        beside_us=lambda t: 5_000 * noise[t][2],
        constant_us=lambda t: 50_000 * noise[t][3],
    )
    plans = [chosen(choice) for choice in play.run(200)]
    assert sum(one != other for one, other in pairwise(plans[20:])) <= 1
    assert plans[-1][0] == 5


@pytest.mark.parametrize("latency_ms", [65, 50, 30, 10])
def test_a_latency_that_falls_is_found_within_four_rounds(latency_ms: int) -> None:
    """Of 100 ms on 320 kbit/s. A larger payload then takes as long as a small one did before,
    which looks like a faster link at first."""
    turn = 40
    play = Play(
        run_config(steps=20_000, outer={"fragments": 4}),
        lambda _: 40_000,
        constant_us=lambda t: 100_000 if t < turn else 1_000 * latency_ms,
    )
    plans = play.run(80)
    assert play.estimate is not None
    assert 20_000 < play.estimate.rate < 80_000
    for plan in (plans[turn - 1], plans[turn + 4], plans[-1]):
        true = replace(
            play.estimate,
            rate=40_000,
            latency_us=100_000 if plan is plans[turn - 1] else 1_000 * latency_ms,
        )
        sizes = play.menu[plan.codec]
        assert candidate(
            play.config, sizes, plan.codec, plan.inner_steps, true, 2, plan.fragments, True
        ).hides
    assert len({chosen(plan) for plan in plans[turn + 6 :]}) == 1
