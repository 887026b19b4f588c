"""top1: the largest of every block, its two levels, and a format that can be read by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.top1 import Top1
from dilocox.compression.topk import TopK
from dilocox.errors import ConfigError, ExchangeError

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
blocks_of = st.sampled_from([2, 3, 12, 64, 100, 128, 600, 4096, 32768])


def draw(seed: int, blocks: int) -> Tensor:
    """Heavy-tailed values, all of different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(blocks * BLOCK, generator=generator)
    return normal * torch.randn(blocks * BLOCK, generator=generator).exp()


def by_hand(payload: Tensor, n: int, block: int) -> list[float]:
    """Values, read bit by bit as the module says."""
    data, values = payload.numpy().tobytes(), [0.0] * n
    count = math.ceil(n / block)
    width = math.ceil(math.log2((block + 1) ** 4))
    for first in range(0, count, 64):
        here = min(64, count - first)
        size = 4 + math.ceil((2 * here + width * math.ceil(here / 4)) / 8)
        record, data = data[:size], data[size:]
        levels = torch.frombuffer(bytearray(record[:4]), dtype=torch.bfloat16).tolist()
        stream = int.from_bytes(record[4:], "little")
        for number in range(here):
            negative, large = stream >> number & 1, stream >> here + number & 1
            four = stream >> 2 * here + width * (number // 4) & (1 << width) - 1
            place = four // (block + 1) ** (number % 4) % (block + 1)
            if place < block:
                values[(first + number) * block + place] = levels[large] * (-1) ** negative
    assert data == b""
    return values


@pytest.mark.parametrize(
    ("block", "n", "size"),
    # w is 7 for B = 2, 17 for 16, 25 for 64 (65^4 is above 2^24), 37 for 512 and 600.
    [
        (2, 128, 4 + 16 + 16 * 7 // 8),
        (16, 1024, 4 + 16 + 34),
        (64, 4096, 4 + 16 + 50),
        (64, 4096 + 128, 70 + 4 + 4),
        (512, 512 * 64, 4 + 16 + 74),
        (512, 128, 4 + 5),
        (600, 640 * 60, 94),
        (32768, 128, 4 + 8),
    ],
)
def test_bytes(block: int, n: int, size: int) -> None:
    assert Top1(block).payload_bytes(n) == size
    assert Top1(block).encode(torch.ones(n)).numel() == size


def test_it_takes_fewer_bits_than_as_dense_a_topk() -> None:
    for block in (16, 64, 256, 512, 585):
        kept = round(4096 / block)
        assert Top1(block).payload_bytes(1 << 20) < 0.9 * TopK(kept).payload_bytes(1 << 20)


@given(seed=st.integers(0, 1000), blocks=st.sampled_from([1, 3, 33, 64, 700]), block=blocks_of)
@PROPERTY
def test_against_the_format_read_by_hand(seed: int, blocks: int, block: int) -> None:
    values = draw(seed, blocks)
    n, top1 = values.numel(), Top1(block)
    payload = top1.encode(values)
    assert payload.shape == (top1.payload_bytes(n),)
    sent = top1.decode(payload, n)
    assert sent.tolist() == by_hand(payload, n, block)
    for start in range(0, n, block):
        here, of_it = values[start : start + block], sent[start : start + block]
        largest = int(here.abs().argmax())
        assert of_it.nonzero().flatten().tolist() == [largest]
        assert of_it[largest].sign() == here[largest].sign()
    for start in range(0, n, 64 * block):
        kept = sent[start : start + 64 * block].nonzero().flatten() + start
        by_size = kept[values[kept].abs().argsort()]
        assert (sent[by_size].abs().diff() >= 0).all()


@pytest.mark.parametrize("block", [8, 100])
def test_levels_have_the_least_error(block: int) -> None:
    values = draw(3, 64 * block // BLOCK * 3)
    sent = Top1(block).decode(Top1(block).encode(values), values.numel())
    for chunk, of_it in zip(values.split(64 * block), sent.split(64 * block), strict=True):
        sizes = np.sort(chunk[of_it != 0].abs().double().numpy())
        halves = ((sizes[:cut], sizes[cut:]) for cut in range(1, len(sizes)))
        least = min(small.var() * len(small) + large.var() * len(large) for small, large in halves)
        error = float((chunk - of_it)[of_it != 0].double().square().sum())
        # bf16 levels: off by up to one part in 256 each.
        assert error <= least + len(sizes) * float(of_it.abs().max() / 2**8) ** 2


@given(seed=st.integers(0, 1000), power=st.integers(-40, 40), block=blocks_of)
@PROPERTY
def test_scale_passes_through(seed: int, power: int, block: int) -> None:
    values, top1 = draw(seed, 33), Top1(block)
    sent = top1.decode(top1.encode(values), values.numel())
    scaled = top1.decode(top1.encode(values * 2.0**power), values.numel())
    assert torch.equal(scaled, sent * 2.0**power)


def test_blocks_of_zeros_stay_zero() -> None:
    values = torch.zeros(64 * BLOCK)
    values[[7, 4000]] = torch.tensor([3.0, -3.0])
    for block in (2, 12, 64, 512, 32768):
        top1 = Top1(block)
        sent = top1.decode(top1.encode(values), values.numel())
        assert sent.nonzero().flatten().tolist() in ([7, 4000], [7])
        assert not top1.decode(top1.encode(torch.zeros(BLOCK)), BLOCK).any()
    # Few values among zeros keep their size.
    assert torch.equal(Top1(64).decode(Top1(64).encode(values), values.numel()), values)


def test_blocks_of_zeros_do_not_count_for_levels() -> None:
    """Half of a record is zeros, a quarter has 1 and a quarter 3: two levels say that exactly."""
    values = torch.zeros(64 * 64)
    values[32 * 64 : 48 * 64 : 64] = 1.0
    values[48 * 64 :: 64] = -3.0
    assert torch.equal(Top1(64).decode(Top1(64).encode(values), values.numel()), values)


@given(seed=st.integers(0, 1000), empty=st.integers(0, 32))
@PROPERTY
def test_values_are_sent_alike_whatever_zeros_are_beside_them(seed: int, empty: int) -> None:
    values = draw(seed, 32)
    values[: empty * BLOCK] = 0.0
    here, n = Top1(64), values.numel()
    sent = here.decode(here.encode(values), n)
    # The same values, and nothing else: a record of fewer blocks.
    rest = values[empty * BLOCK :]
    assert torch.equal(here.decode(here.encode(rest), rest.numel()), sent[empty * BLOCK :])
    assert not sent[: empty * BLOCK].any()


@pytest.mark.parametrize("block", [0, 1, 32769])
def test_a_block_that_cannot_be_is_refused(block: int) -> None:
    with pytest.raises(ConfigError, match=f"codec 'top1:{block}': B must be from 2 to 32768"):
        Top1(block)


def test_equals_are_told_apart_by_their_place() -> None:
    values = torch.full((4 * BLOCK,), -0.75)
    sent = Top1(16).decode(Top1(16).encode(values), values.numel())
    assert torch.equal(sent[::16], values[::16])
    assert sent.count_nonzero() == 4 * BLOCK // 16


def test_limits() -> None:
    largest = torch.finfo(torch.float32).max
    for tiny in (2.0**-127, 2.0**-140):
        values = torch.cat([torch.full((4096,), largest), torch.full((4096,), tiny)])
        sent = Top1(64).decode(Top1(64).encode(values), 8192)
        assert torch.isfinite(sent).all()
        assert torch.allclose(sent[:4096:64], values[:4096:64], rtol=2**-7)
        assert not sent[4096:].any()


@pytest.mark.parametrize("level", [2.0**-127, -0.0, -1.0, float("nan"), float("inf")])
def test_levels_that_nobody_writes_are_refused(level: float) -> None:
    payload = Top1(64).encode(draw(1, 33))
    payload[2:4].view(torch.bfloat16)[0] = level
    with pytest.raises(ExchangeError, match="top1:64 payload refused: it has a scale"):
        Top1(64).decode(payload, 33 * BLOCK)


def test_places_and_codes_that_nobody_writes_are_refused() -> None:
    top1, n = Top1(100), BLOCK
    payload = top1.encode(draw(2, 1))
    # Two blocks, of 100 and of 28 values: codes in bits 0 to 3, one number of 27 bits behind them.
    assert payload.numel() == 4 + 4
    for codes, places, padding, reason in (
        (0, (0, 28, 0, 0), 0, "behind the end"),
        (0, (0, 0, 1, 0), 0, "a place beyond its block"),
        (0b0001, (100, 0, 0, 0), 0, "a code without a value"),
        (0b1000, (0, 100, 0, 0), 0, "a code without a value"),
        (0, (0, 0, 0, 101), 0, "a place beyond its block"),
        (0, (0, 27, 0, 0), 1, "bits behind its last place"),
    ):
        four = sum(place * 101**number for number, place in enumerate(places))
        stream = codes | four << 4 | padding << 31
        payload[4:] = torch.frombuffer(bytearray(stream.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(ExchangeError, match=f"top1:100 payload refused: .*{reason}"):
            top1.decode(payload, n)
    fine = 27 * 101 << 4
    payload[4:] = torch.frombuffer(bytearray(fine.to_bytes(4, "little")), dtype=torch.uint8)
    assert top1.decode(payload, n).shape == (n,)
