"""Which pieces of a stage each fragment of a round consists of.

`outer.fragments` sets the number of pieces of a stage for the whole run; every piece has an outer
state of its own. A round may exchange neighbouring pieces together, as one fragment of its plan.
This saves messages and headers, but the larger fragment lands later.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dilocox.errors import ConfigError


def pieces_of(fragment: int, fragments: int, pieces: int) -> range:
    """Return the numbers of the pieces that form fragment `fragment` of `fragments`.

    The `pieces` pieces of a stage are divided in order and as evenly as possible. Raises
    `ConfigError` if a number is out of range.
    """
    if not 0 <= fragment < fragments <= pieces:
        raise ConfigError(f"no fragment {fragment} of {fragments}: a stage has {pieces} pieces")
    return range(fragment * pieces // fragments, (fragment + 1) * pieces // fragments)


def fragment_counts(pieces: int) -> list[int]:
    """Return the numbers of fragments that a round may have, in descending order.

    The first is `pieces` (every piece alone). Each further number is half of the number before,
    rounded down; the last is 1.
    """
    found = [pieces]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def apart(numbers: Iterable[int], pieces: int) -> list[range]:
    """Return the smallest runs of neighbouring pieces that no fragment crosses, in order.

    `numbers` holds the numbers of fragments that rounds may have. With any of them, every fragment
    lies inside one run. Raises `ConfigError` if a number is out of range.
    """
    ends = set(range(1, pieces + 1))
    for number in numbers:
        if number < 1:
            raise ConfigError(f"a round of {number} fragments")
        ends &= {pieces_of(fragment, number, pieces).stop for fragment in range(number)}
    cuts = [0, *sorted(ends)]
    return [range(start, end) for start, end in pairwise(cuts)]
