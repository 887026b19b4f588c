"""The outer momentum in bf16: rounded to nearest even, once per step, everywhere alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.outer.outer_step import nesterov_step
from dilocox.utils.rounding import round_to_bf16

pytestmark = pytest.mark.waits


def bits(value: int) -> torch.Tensor:
    """The fp32 value with these bits, [1]."""
    return torch.tensor([value - (1 << 32) if value >> 31 else value], dtype=torch.int32).view(
        torch.float32
    )


@pytest.mark.parametrize(
    ("given_bits", "expected"),
    [
        (0x3F800000, 0x3F80),  # 1 stays
        (0x3F808000, 0x3F80),  # a tie goes to the even one below
        (0x3F818000, 0x3F82),  # and to the even one above
        (0x3F808001, 0x3F81),  # more than half goes up
        (0x3F807FFF, 0x3F80),  # less goes down
        (0xBF818000, 0xBF82),  # of negative values by their size
        (0x00018000, 0x0002),  # subnormal values are values
        (0x80000001, 0x8000),  # too small: zero, with its sign
        (0x7F7FFFFF, 0x7F80),  # beyond the largest: infinite
        (0xFF800000, 0xFF80),  # infinite stays
    ],
)
def test_rounding_by_hand(given_bits: int, expected: int) -> None:
    found = round_to_bf16(bits(given_bits))
    assert found.dtype == torch.bfloat16
    assert int(found.view(torch.int16)) & 0xFFFF == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=200))
def test_rounding_is_torchs_own_where_all_processors_agree(many: list[int]) -> None:
    values = torch.cat([bits(each) for each in many])
    # Normal values: of the others processors think differently.
    values = values[values.isfinite() & (values.abs() >= torch.finfo(torch.float32).tiny)]
    assert torch.equal(round_to_bf16(values), values.to(torch.bfloat16))


def test_a_step_with_momentum_in_bf16_by_hand() -> None:
    anchor, momentum = torch.tensor([1.0]), torch.tensor([0.5], dtype=torch.bfloat16)
    average = torch.tensor([1.0 + 2**-8])
    nesterov_step(anchor, momentum, average, 0.5, 0.5)
    # m = 0.25 + 1 + 2^-8 has nine bits: the step goes by all of them,
    total = 1.25 + 2**-8
    assert float(anchor) == 1.0 - 0.5 * (0.5 * total + 1.0 + 2**-8)
    # what is kept has eight: a tie, to the even one below.
    assert momentum.dtype == torch.bfloat16
    assert float(momentum) == 1.25


def test_momentum_in_bf16_stays_near_that_in_fp32() -> None:
    draw = torch.Generator().manual_seed(3)
    exact = torch.zeros(512), torch.zeros(512)
    rounded = torch.zeros(512), torch.zeros(512, dtype=torch.bfloat16)
    for _ in range(100):
        average = torch.randn(512, generator=draw)
        nesterov_step(*exact, average, 0.7, 0.9)
        nesterov_step(*rounded, average, 0.7, 0.9)
    # Errors of 2^-9 of m each, independent: 1 / (1 - 0.9) of them live, and all are in the anchor.
    assert float((exact[0] - rounded[0]).norm() / exact[0].norm()) < 0.01
    assert float((exact[1] - rounded[1].float()).norm() / exact[1].norm()) < 0.01
