"""The learning-rate schedules, by their properties."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.config.site import InnerSection
from dilocox.inner import learning_rate

pytestmark = pytest.mark.waits

KINDS = st.sampled_from(["cosine", "wsd", "constant"])


@given(
    kind=KINDS,
    total=st.integers(1, 400),
    warmup=st.integers(0, 500),
    decay=st.integers(0, 500),
    final=st.floats(0.0, 1.0),
)
def test_stays_within_bounds_and_never_rises_after_warmup(
    kind: Any, total: int, warmup: int, decay: int, final: float
) -> None:
    inner = InnerSection(
        learning_rate=0.5,
        schedule=kind,
        warmup_steps=warmup,
        decay_steps=decay,
        final_fraction=final,
    )
    rates = [learning_rate(step, total, inner) for step in range(total + 3)]
    assert all(0.0 <= rate <= 0.5 + 1e-12 for rate in rates)
    after = rates[max(0, warmup - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    before = rates[: min(warmup, total)]
    if kind == "constant":
        assert before == sorted(before)


@given(kind=KINDS, total=st.integers(30, 400), warmup=st.integers(1, 10))
def test_warmup_is_linear_and_reaches_the_peak(kind: Any, total: int, warmup: int) -> None:
    inner = InnerSection(learning_rate=2.0, schedule=kind, warmup_steps=warmup)
    rates = [learning_rate(step, total, inner) for step in range(warmup)]
    assert rates == pytest.approx([2.0 * (step + 1) / warmup for step in range(warmup)])


@given(
    kind=st.sampled_from(["cosine", "wsd"]), total=st.integers(2, 400), final=st.floats(0.0, 1.0)
)
def test_last_step_has_the_final_fraction(kind: Any, total: int, final: float) -> None:
    inner = InnerSection(learning_rate=3.0, schedule=kind, warmup_steps=0, final_fraction=final)
    assert learning_rate(total - 1, total, inner) == pytest.approx(3.0 * final)
    assert learning_rate(total + 7, total, inner) == pytest.approx(3.0 * final)


def test_values_worked_by_hand() -> None:
    cosine = InnerSection(learning_rate=1.0, schedule="cosine", warmup_steps=2, final_fraction=0.0)
    assert [learning_rate(step, 7, cosine) for step in range(7)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6
    )
    wsd = InnerSection(
        learning_rate=1.0, schedule="wsd", warmup_steps=2, decay_steps=4, final_fraction=0.2
    )
    assert [learning_rate(step, 8, wsd) for step in range(8)] == pytest.approx(
        [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )
    constant = InnerSection(learning_rate=1.0, schedule="constant", warmup_steps=0)
    assert learning_rate(0, 5, constant) == learning_rate(4, 5, constant) == 1.0
