"""What a round's fragments are made of: runs of the pieces that a run divides each stage into.

`outer.fragments` says how many pieces a stage has, for the whole run; every piece has an outer
state of its own. A round may exchange neighbouring pieces together, as one fragment of its plan:
fewer messages and headers, for a landing that comes later.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dilocox.errors import ConfigError


def pieces_of(fragment: int, fragments: int, pieces: int) -> range:
    """The pieces, of `pieces` in all, that `fragment` of `fragments` is made of.

    As many for each as can be, in order. Raises `ConfigError` for numbers out of range.
    """
    if not 0 <= fragment < fragments <= pieces:
        raise ConfigError(f"no fragment {fragment} of {fragments}: a stage has {pieces} pieces")
    return range(fragment * pieces // fragments, (fragment + 1) * pieces // fragments)


def fragment_counts(pieces: int) -> list[int]:
    """Numbers of fragments that a round may have, falling: all pieces apart, then halves of that
    down to one."""
    found = [pieces]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def apart(numbers: Iterable[int], pieces: int) -> list[range]:
    """Runs of pieces, in order, as small as they can be if each fragment is to lie in one of them,
    with these `numbers` of fragments.

    Raises `ConfigError` for numbers out of range.
    """
    ends = set(range(1, pieces + 1))
    for number in numbers:
        if number < 1:
            raise ConfigError(f"a round of {number} fragments")
        ends &= {pieces_of(fragment, number, pieces).stop for fragment in range(number)}
    cuts = [0, *sorted(ends)]
    return [range(start, end) for start, end in pairwise(cuts)]
