"""Which pieces a round's fragments are made of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.coordinator.protocol.fragment_groups import apart, fragment_counts, pieces_of
from dilocox.errors import ConfigError

pytestmark = pytest.mark.waits

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)


@PROPERTY
@given(st.integers(1, 40), st.data())
def test_every_piece_is_in_one_fragment(pieces: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, pieces))
    runs = [pieces_of(fragment, fragments, pieces) for fragment in range(fragments)]
    assert [piece for run in runs for piece in run] == list(range(pieces))
    assert {len(run) for run in runs} <= {pieces // fragments, -(-pieces // fragments)}


@pytest.mark.parametrize(("fragment", "fragments", "pieces"), [(2, 2, 4), (-1, 2, 4), (0, 5, 4)])
def test_what_is_no_fragment_is_refused(fragment: int, fragments: int, pieces: int) -> None:
    with pytest.raises(ConfigError, match="no fragment"):
        pieces_of(fragment, fragments, pieces)


def test_a_round_has_one_fragment_at_least() -> None:
    with pytest.raises(ConfigError, match="a round of 0 fragments"):
        apart([4, 0], 4)


def test_numbers_of_fragments_fall_to_one() -> None:
    assert fragment_counts(4) == [4, 2, 1]
    assert fragment_counts(7) == [7, 3, 1]
    assert fragment_counts(1) == [1]


@PROPERTY
@given(st.integers(1, 12), st.data())
def test_blocks_are_the_smallest_that_no_fragment_crosses(pieces: int, data: st.DataObject) -> None:
    numbers = data.draw(st.sets(st.integers(1, pieces)))
    blocks = apart(numbers, pieces)
    assert [piece for block in blocks for piece in block] == list(range(pieces))
    runs = [set(pieces_of(f, number, pieces)) for number in numbers for f in range(number)]
    for run in runs:
        assert sum(bool(run & set(block)) for block in blocks) == 1
    # Every cut between two blocks could be no other: each pair inside of one is held together.
    for block in blocks:
        for left in block[:-1]:
            assert any({left, left + 1} <= run for run in runs)
