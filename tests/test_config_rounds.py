"""Rates of a run file as numbers, numbers as text, and keys that do not go together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.config import resolve_run
from dilocox.config_rounds import rate_of, rate_text
from dilocox.errors import ConfigError


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (200e6, "200 Mbit/s"),
        (1e9, "1 Gbit/s"),
        (999_600, "1 Mbit/s"),  # not 1e+03 kbit/s
        (105_700, "106 kbit/s"),
        (1_234_567, "1.23 Mbit/s"),
        (12, "12 bit/s"),
        (2.5e13, "2.5e+04 Gbit/s"),
    ],
)
def test_a_rate_is_written_with_three_digits(bits: float, text: str) -> None:
    assert rate_text(bits) == text


@given(st.integers(8, 10**11))
def test_what_is_written_is_read_as_nearly_the_same(bits: int) -> None:
    number, unit = rate_text(bits, digits=6).split(" ")
    if unit == "bit/s":
        assert float(number) == bits
    else:
        written = f"{float(number):f}{unit.removesuffix('/s').lower()}"
        assert 8 * rate_of(written) == pytest.approx(bits, rel=2e-5, abs=8)


def test_a_residual_that_holds_others_rounding_is_not_trained_on() -> None:
    """An owner's residual holds the rounding of the whole mean, D times what its own part is."""
    run = {"model": {"path": "x"}, "sites": {"a": {}, "b": {}}, "outer": {"exchange": "reduce"}}
    resolve_run(run)
    with pytest.raises(ConfigError, match=r'residual_view: with outer\.exchange = "reduce"'):
        resolve_run({**run, "compression": {"residual_view": 0.2}})
