from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data.mixture import RESOLUTION, Mixture, integer_weights

WEIGHTS = st.lists(st.integers(1, 50) | st.floats(0.001, 1000.0), min_size=1, max_size=6)
LIMITS = st.lists(st.none() | st.integers(1, 60), min_size=6, max_size=6)


def dealt_one_by_one(mixture: Mixture, count: int) -> list[tuple[int, int]]:
    """(source, number in the source) of the first numbers, counted and not computed."""
    seen: dict[int, int] = {}
    result = []
    for source in mixture.sources(0, count).tolist():
        result.append((source, seen.get(source, 0)))
        seen[source] = seen.get(source, 0) + 1
    return result


@settings(deadline=None)
@given(WEIGHTS, LIMITS, st.integers(0, 300), st.integers(0, 200))
def test_any_range_is_what_dealing_from_the_start_gives(
    weights: list[float], limits: list[int | None], start: int, count: int
) -> None:
    limits = [None, *limits[1 : len(weights)]]
    mixture = Mixture(weights, limits)
    expected = dealt_one_by_one(mixture, start + count)
    sources = mixture.sources(start, count).tolist()
    assert sources == [source for source, _ in expected[start:]]
    before, after = mixture.counts(start), mixture.counts(start + count)
    for source in range(len(weights)):
        own = [number for each, number in expected[start:] if each == source]
        assert own == list(range(before[source], after[source]))


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 2**40))
def test_every_prefix_has_each_sources_share(weights: list[float], number: int) -> None:
    counts = Mixture(weights).counts(number)
    whole = integer_weights(weights)
    assert sum(counts) == number
    for weight, count in zip(whole, counts, strict=True):
        assert abs(count - Fraction(number * weight, sum(whole))) < len(weights)


@settings(deadline=None)
@given(WEIGHTS, LIMITS)
def test_limits_are_reached_exactly_and_not_passed(
    weights: list[float], limits: list[int | None]
) -> None:
    ends = [limit or 7 for limit in limits[: len(weights)]]
    mixture = Mixture(weights, ends)
    assert mixture.end == sum(ends)
    assert np.bincount(mixture.sources(0, sum(ends)), minlength=len(ends)).tolist() == ends
    with pytest.raises(ValueError, match="the sources end at number"):
        mixture.sources(0, sum(ends) + 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=5), st.integers(1, 50))
def test_others_share_the_weight_of_a_source_that_dropped_out(
    weights: list[int], limit: int
) -> None:
    mixture = Mixture(weights, [limit] + [None] * (len(weights) - 1))
    sources = mixture.sources(0, 200 * sum(weights)).tolist()
    last = max(n for n, source in enumerate(sources) if source == 0)
    rest = np.array(sources[last + 1 :])
    assert mixture.all_given(last) == []
    assert mixture.all_given(last + 1) == [0]
    for source, weight in enumerate(weights[1:], 1):
        share = Fraction(len(rest) * weight, sum(weights[1:]))
        assert abs(np.count_nonzero(rest == source) - share) < len(weights)


def test_far_numbers_are_exact_and_need_no_history() -> None:
    start = 2**61
    mixture = Mixture([3, 1, 0.5], [None, 2**50, None])
    found = mixture.sources(start, 9_000)
    before, after = mixture.counts(start), mixture.counts(start + 9_000)
    assert [b - a for a, b in zip(before, after, strict=True)] == np.bincount(found).tolist()[:3]
    assert before[1] == 2**50


def test_decimals_count_as_decimals() -> None:
    assert integer_weights([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert integer_weights([3, 1]) == [3, 1]
    assert integer_weights([0.75, 0.25]) == [3, 1]


def test_huge_and_tiny_weights_stay_in_the_arithmetic() -> None:
    whole = integer_weights([1e300, 1.0, 1e-300])
    assert min(whole) == 1
    assert sum(whole) <= RESOLUTION + 3


def test_fixed_numbers() -> None:
    """The dealing is part of what a record means: it never changes."""
    assert Mixture([3, 1]).sources(0, 12).tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert Mixture([2, 1, 1], [3, None, None]).sources(0, 12).tolist() == [
        2, 0, 1, 0, 2, 0, 2, 1, 2, 1, 2, 1,
    ]  # fmt: skip
