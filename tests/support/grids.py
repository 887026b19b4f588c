"""Grids of cases of which `make test` runs so many that every pair of values occurs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs_of(*axes: Sequence[Any], rest: pytest.MarkDecorator) -> list[Any]:
    """Return all combinations of a value of each axis, as `pytest.param`.

    Some have no mark: of any two axes, each pair of values occurs in one of them. All others are
    marked with `rest`. What goes wrong goes wrong for one value or for two of them, nearly always
    (Kuhn, Wallace and Gallo, IEEE Transactions on Software Engineering 30(6), 2004).

    The choice follows from the numbers of values alone: it takes what has most pairs that are
    missing, and the first of those.
    """
    cases = list(product(*(range(len(axis)) for axis in axes)))
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: sum(pair in missing for pair in _pairs(case)))
        chosen.add(best)
        missing.difference_update(_pairs(best))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, case, strict=True)),
            marks=() if case in chosen else rest,
        )
        for case in cases
    ]


def _pairs(case: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Pairs of (axis, number of the value)."""
    return combinations(enumerate(case), 2)
