"""Rows hold whole documents, and few rows are needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data.best_fit import best_fit

SETTINGS = settings(derandomize=True, deadline=None, max_examples=100)


def slowly(lengths: list[int], room: int) -> list[int]:
    """The same rule, by looking at all rows every time."""
    left: list[int] = []
    emptied: list[int] = []
    found = [0] * len(lengths)
    for document in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[document]
        fits = [row for row, free in enumerate(left) if free >= length]
        if fits:
            row = min(fits, key=lambda row: (left[row], -emptied[row]))
        else:
            row = len(left)
            left.append(room)
            emptied.append(0)
        left[row] -= length
        emptied[row] = max(emptied, default=0) + 1
        found[document] = row
    return found


@SETTINGS
@given(lengths=st.lists(st.integers(1, 12), max_size=40), more=st.integers(0, 5))
def test_rows_are_those_of_the_rule_and_none_is_too_full(lengths: list[int], more: int) -> None:
    room = max(lengths, default=1) + more
    rows = best_fit(np.array(lengths, dtype=np.int64), room)
    assert rows.tolist() == slowly(lengths, room)
    used = np.bincount(rows, weights=lengths) if lengths else np.zeros(0)
    assert (used <= room).all()
    assert (used > 0).all()
    # At most one row is at most half full.
    assert np.count_nonzero(used * 2 <= room) <= 1


def test_documents_of_many_lengths_fill_rows_well() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 5000)
    rows = best_fit(lengths, 512)
    assert lengths.sum() / ((rows.max() + 1) * 512) > 0.99


@pytest.mark.parametrize("length", [0, 6])
def test_a_document_that_has_no_room_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="lengths must be 1 to 5"):
        best_fit(np.array([3, length]), 5)
