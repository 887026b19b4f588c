"""Rates of a run file as numbers, and numbers as text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.config.outer import RATE, rate_of, rate_text

pytestmark = pytest.mark.waits


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


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 125_000_000), ("1000000kbit", 125_000_000), ("4782755.840kbit", 597_844_480)],
)
def test_a_rate_may_be_written_in_any_unit(text: str, rate: int) -> None:
    assert re.fullmatch(RATE, text)
    assert rate_of(text) == rate
