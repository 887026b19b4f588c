"""cocktail: the same draw everywhere, then the largest of what was drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.cocktail import Cocktail
from dilocox.errors import ExchangeError


def draw(seed: int, blocks: int) -> Tensor:
    return torch.randn(blocks * BLOCK, generator=torch.Generator().manual_seed(seed))


def drawn(cocktail: Cocktail, n: int) -> list[int]:
    return [int(each) for each in cocktail.positions(0, math.ceil(n / 10), n)]


def by_hand(seed: int, place: int, group: int) -> int:
    """Position that SplitMix64 draws of a whole group, with Python's whole numbers."""

    def mix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    step = 0x9E3779B97F4A7C15
    key = mix((mix((seed + step) % 2**64) ^ place) + step & (2**64 - 1))
    high = mix((group * step + key) % 2**64) >> 32
    return group * 10 + (high * 10 >> 32)


@given(seed=st.integers(0, 2**64 - 1), place=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_draw_is_arithmetic_on_whole_numbers(seed: int, place: int) -> None:
    found = drawn(Cocktail(seed, place), 1280)
    assert found == [by_hand(seed, place, group) for group in range(128)]


def test_the_draw_is_even_and_another_for_another_seed_or_place() -> None:
    n = 128 * 5001
    found = np.array(drawn(Cocktail(5, 0), n))
    assert found.shape == (64013,)
    assert (np.diff(found) > 0).all()
    assert found[-1] in range(n - n % 10, n)
    counts = np.bincount(found[:-1] % 10, minlength=10)
    assert abs(counts - 6401.2).max() < 5 * math.sqrt(6401)
    for other in (Cocktail(6, 0), Cocktail(5, 128)):
        same = (np.array(drawn(other, n)) == found).mean()
        assert 0.09 < same < 0.11
    # Positions do not depend on the piece in which they are asked for.
    part = Cocktail(5, 0).positions(4096, 8192, n)
    assert np.array_equal(part, found[4096:8192])


@given(seed=st.integers(0, 1000), blocks=st.sampled_from([1, 3, 160, 319, 320, 321, 700]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_what_is_sent_is_the_largest_of_what_was_drawn(seed: int, blocks: int) -> None:
    values, cocktail = draw(seed, blocks), Cocktail(seed, 256)
    n = values.numel()
    payload = cocktail.encode(values)
    sent = cocktail.decode(payload, n)
    picked, expected, size = drawn(cocktail, n), torch.zeros(n), 0
    for start in range(0, len(picked), 4096):
        some = torch.tensor(picked[start : start + 4096])
        k = math.ceil(820 * len(some) / 4096)
        streams = [k * (5 + low) + (len(some) >> low) for low in range(13)]
        size += 2 + math.ceil(min(streams) / 8)
        strongest = some[values[some].abs().topk(k).indices]
        scale = (values[strongest].abs().max() * torch.tensor(1 / 7)).bfloat16().float()
        expected[strongest] = (values[strongest] * scale.reciprocal()).round() * scale
    assert payload.shape == (size,)
    assert torch.equal(sent, expected)


def test_over_many_draws_every_position_has_its_turn() -> None:
    seen = torch.zeros(1280)
    for seed in range(200):
        seen[drawn(Cocktail(seed, 0), 1280)] += 1
    assert seen.min() > 4
    assert seen.max() < 45


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 2.0**127])
def test_scales_that_nobody_writes_are_refused(scale: float) -> None:
    payload = Cocktail(1, 0).encode(draw(1, 33))
    payload[:2].view(torch.bfloat16)[0] = scale
    with pytest.raises(ExchangeError, match="cocktail payload refused: it has a scale"):
        Cocktail(1, 0).decode(payload, 33 * BLOCK)


def test_entries_that_nobody_writes_are_refused() -> None:
    cocktail = Cocktail(1, 0)
    payload = cocktail.encode(draw(1, 1))
    # Three of 13 that are looked at: 12 bits of codes, a low bit each, then ones among nine bits.
    assert payload.numel() == 2 + 3
    for codes, low, high, reason in (
        ([1, 15, 7], 0b000, 0b100100001, None),
        ([1, 8, 7], 0b000, 0b100100001, "code -8"),
        ([1, 15, 7], 0b000, 0b100000011, "do not ascend"),  # 0, 0, 12
        ([1, 15, 7], 0b100, 0b100100001, "do not ascend"),  # 0, 8, 13
        ([1, 15, 7], 0b000, 0b100000001, "does not have 3 indices"),
    ):
        stream = low << 12 | high << 15
        for number, code in enumerate(codes):
            stream |= sum((code >> place & 1) << 3 * place + number for place in range(4))
        payload[2:] = torch.frombuffer(bytearray(stream.to_bytes(3, "little")), dtype=torch.uint8)
        if reason is None:
            picked = [drawn(cocktail, BLOCK)[index] for index in (0, 8, 12)]
            sent = cocktail.decode(payload, BLOCK)
            scale = float(payload[:2].view(torch.bfloat16)[0])
            assert sent[picked].tolist() == [scale, -scale, 7 * scale]
            continue
        with pytest.raises(ExchangeError, match=f"cocktail payload refused: .*{reason}"):
            cocktail.decode(payload, BLOCK)


def test_largest_values_stay_finite() -> None:
    values = torch.full((1280,), torch.finfo(torch.float32).max)
    sent = Cocktail(1, 0).decode(Cocktail(1, 0).encode(values), 1280)
    assert torch.isfinite(sent).all()
    assert not Cocktail(1, 0).decode(Cocktail(1, 0).encode(torch.zeros(1280)), 1280).any()
