"""Thinned grids have every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.grids import pairs_of


@pytest.mark.parametrize("sizes", [(3, 2), (5, 2, 2, 2), (3, 4, 2), (2, 2, 2, 2, 2)])
def test_every_pair_of_values_is_in_a_case_without_mark(sizes: tuple[int, ...]) -> None:
    axes = [[f"{number}{value}" for value in range(size)] for number, size in enumerate(sizes)]
    cases = pairs_of(*axes, rest=pytest.mark.skip)
    assert [case.values for case in cases] == list(product(*axes))
    kept = [case.values for case in cases if not case.marks]
    pairs = {pair for case in kept for pair in combinations(case, 2)}
    assert pairs == {pair for one, other in combinations(axes, 2) for pair in product(one, other)}
    assert len(kept) < len(cases) or len(sizes) < 3
