from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.coordinator.controller.message_load import MOST, Keys, message_rate, proposed


def test_messages_of_a_round() -> None:
    # One rank, rounds of one step of 0.88 s: 2,600 bytes and four times 1,600.
    assert message_rate(1, 4, 0.88, 1) == pytest.approx(8 * 9000 / 0.88)
    assert message_rate(2, 4, 0.88, 1) == pytest.approx(message_rate(1, 4, 0.88, 1) / 2)
    assert message_rate(1, 4, 0.88, 6) == pytest.approx(6 * message_rate(1, 4, 0.88, 1))


def test_keys_for_the_link_of_the_time_to_a_loss() -> None:
    # Rounds of one step with two fragments take 52.7 of 63 kbit/s, rounds of two steps 26.4.
    assert proposed(63_000, 4, 0.88, 1) == Keys(36_600, 0.203, 2)
    assert proposed(63_000, 1, 0.88, 1) == Keys(43_900, 0.203, 1)
    assert proposed(100, 4, 0.88, 1) is None


@given(
    rate=st.floats(1e3, 1e9),
    fragments=st.integers(1, 8),
    step_seconds=st.floats(1e-3, 100.0),
    ranks=st.integers(1, 64),
)
def test_at_least_half_of_the_link_is_left(
    rate: float, fragments: int, step_seconds: float, ranks: int
) -> None:
    keys = proposed(rate, fragments, step_seconds, ranks)
    if keys is None:
        assert message_rate(500, min(fragments, 2), step_seconds, ranks) > MOST * rate
    else:
        assert (1 - MOST) * rate - 51 <= keys.link <= rate + 51
        assert keys.fragments <= fragments
