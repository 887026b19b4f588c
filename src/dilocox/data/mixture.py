"""Deals numbers to weighted sources: a pure function with random access and without history.

Among the first n numbers, each source has its share of n within a few numbers, as in the blended
data sets of Megatron-Core. A source that has reached its limit drops out, and the other sources
share its weight. All arithmetic is in integers, so that every machine computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

RESOLUTION = 1 << 30
"""Largest sum of integer weights, apart from rounding. Products of two stay below 2^62."""


def integer_weights(weights: Sequence[float | int]) -> list[int]:
    """Returns integers in the ratio of `weights`, each 1 or more.

    A decimal such as 0.1 counts as one tenth, not as the nearest binary number. Ratios are exact if
    their integers sum to `RESOLUTION` at most, else they are rounded.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    total = sum(whole)
    if total <= RESOLUTION:
        return whole
    return [max(1, round(Fraction(each * RESOLUTION, total))) for each in whole]


@dataclass(frozen=True)
class _Phase:
    """Numbers from `first` on, until a source reaches its limit."""

    first: int
    weights: tuple[int, ...]
    """Integer weight of each source; 0: the source has dropped out."""
    given: tuple[int, ...]
    """Numbers that each source had before `first`."""


class Mixture:
    """Which source each number belongs to, and how many numbers of the source came before it."""

    def __init__(
        self, weights: Sequence[float | int], limits: Sequence[int | None] | None = None
    ) -> None:
        """Prepare to deal.

        Args:
            weights: finite positive weight of each source.
            limits: most numbers of each source, 1 or more; None: no limit.
        """
        self._limits = list(limits or [None] * len(weights))
        self.end: int | None = None
        """Number of all numbers, if each source has a limit; None: the numbers do not end."""
        self._phases: list[_Phase] = []
        first, given, left = 0, [0] * len(weights), integer_weights(weights)
        while any(left):
            self._phases.append(_Phase(first, tuple(left), tuple(given)))
            reached = [
                _first_with(left, source, limit - given[source])
                for source, limit in enumerate(self._limits)
                if limit is not None and left[source]
            ]
            if not reached:
                return
            length = min(reached)
            given = [a + b for a, b in zip(given, _counts(left, length), strict=True)]
            first += length
            left = [
                0 if count == limit else weight
                for weight, count, limit in zip(left, given, self._limits, strict=True)
            ]
        self.end = first

    def counts(self, number: int) -> list[int]:
        """Returns how many of the numbers below `number` each source has."""
        phase = next(each for each in reversed(self._phases) if each.first <= number)
        inside = _counts(phase.weights, number - phase.first)
        return [a + b for a, b in zip(phase.given, inside, strict=True)]

    def sources(self, start: int, count: int) -> Numbers:
        """Returns the source of each number in [start, start + count): int64 [count].

        The numbers of one source are consecutive in the source's own counting, which begins at
        `counts(start)`. Raises `ValueError` if the numbers end before.
        """
        end = start + count
        if self.end is not None and end > self.end:
            raise ValueError(f"the sources end at number {self.end}, before number {end}")
        found = np.empty(count, dtype=np.int64)
        bounds = [*(phase.first for phase in self._phases[1:]), end]
        for phase, bound in zip(self._phases, bounds, strict=True):
            first, last = max(start, phase.first), min(end, bound)
            if first < last:
                inside = np.arange(first, last + 1, dtype=np.int64) - phase.first
                found[first - start : last - start] = _owners(phase.weights, inside)
        return found

    def all_given(self, number: int) -> list[int]:
        """Returns the sources that have dropped out before `number`."""
        phase = next(each for each in reversed(self._phases) if each.first <= number)
        return [source for source, weight in enumerate(phase.weights) if not weight]


def _counts(weights: Sequence[int], number: int) -> list[int]:
    """Returns how many of `number` numbers each source has.

    Each source in turn takes its share of the numbers that the sources before left, rounded down.
    One more number goes to exactly one source, since a share grows by one number at most.
    """
    counts, left, total = [], number, sum(weights)
    for weight in weights:
        count = left * weight // total if weight else 0
        counts.append(count)
        left -= count
        total -= weight
    return counts


def _owners(weights: Sequence[int], numbers: Numbers) -> Numbers:
    """Returns the source of each number but the last of the consecutive `numbers`: int64 [n - 1].

    The arithmetic is that of `_counts`.
    """
    owners = np.zeros(len(numbers) - 1, dtype=np.int64)
    left, total = numbers, sum(weights)
    for source, weight in enumerate(weights):
        if weight:
            whole, rest = np.divmod(left, total)
            count = whole * weight + rest * weight // total
            owners[np.diff(count) > 0] = source
            left = left - count
        total -= weight
    return owners


def _first_with(weights: Sequence[int], source: int, count: int) -> int:
    """Returns the smallest n for which `source` has `count` of n numbers."""
    low, high = count, count
    while _counts(weights, high)[source] < count:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if _counts(weights, middle)[source] < count:
            low = middle + 1
        else:
            high = middle
    return low
