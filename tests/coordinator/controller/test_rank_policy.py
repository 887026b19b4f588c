"""AdaGradCmp as published (docs/algorithm.md §4)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.rank_policy import choose, mean_rank_milli, settled_rank_milli
from tests.support.controller_inputs import run_config


def config(codec: str = "lowrank:64", **outer: Any) -> RunConfig:
    return run_config(
        outer={"method": "dilocox-paper", **outer},
        compression={"codec": codec},
        control={"window": 3},
    )


def test_it_warms_up_with_the_run_files_rank_and_steps() -> None:
    for ranks in ([], [1000], [1000, 1000]):
        choice = choose(config(), ranks)
        assert (choice.inner_steps, choice.codec) == (125, "lowrank:64")
        assert choice.reason == f"warm-up: {len(ranks)} of 3 rounds measured"


def test_rank_and_steps_follow_the_mean_of_the_window() -> None:
    choice = choose(config(), [64_000, 40_000, 32_000, 24_000])
    assert (choice.codec, choice.inner_steps) == ("lowrank:32", 63)
    assert choice.reason == "effective rank 32.0 over the last 3 rounds, 50% of rank 64"
    # As published, nothing else changes with them.
    assert (choice.learning_rate, choice.momentum, choice.delay, choice.slots) == (0.7, 0.9, 1, 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 200_000), min_size=3, max_size=8),
    st.sampled_from([(125, 1), (120, 4), (7, 7)]),
)
def test_rank_and_steps_stay_in_bounds(ranks: list[int], shape: tuple[int, int]) -> None:
    steps, slots = shape
    given_ = config("lowrank:64:int8", inner_steps=steps, slots=slots, delay=slots)
    choice = choose(given_, ranks)
    kind, rank, bits = choice.codec.split(":")
    assert (kind, bits) == ("lowrank", "int8")
    mean = sum(ranks[-3:]) / 3000
    assert abs(int(rank) - min(64, max(1, mean))) <= 0.5
    assert 1 <= choice.inner_steps <= steps
    assert choice.inner_steps % choice.slots == 0
    assert choice.delay == choice.slots
    assert abs(choice.inner_steps - steps * int(rank) / 64) <= max(0.5, steps / slots)


@pytest.mark.parametrize(("sites", "mean"), [([5], 5), ([1, 2], 2), ([1, 1, 2], 1), ([3, 4, 4], 4)])
def test_the_mean_over_sites_is_a_whole_number(sites: list[int], mean: int) -> None:
    assert mean_rank_milli(sites) == mean


def test_one_site_of_three_says_nothing_of_the_rank() -> None:
    honest = [31_000, 31_000]
    for lie in (0, 2**53):
        assert settled_rank_milli([*honest, lie]) == 31_000
    assert settled_rank_milli([30_000, 31_001]) == 30_501
