"""topk: the largest values, the two best levels, and a format that can be read by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.topk import TopK
from dilocox.errors import ExchangeError


def draw(seed: int, blocks: int) -> Tensor:
    """Heavy-tailed values, all of different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(blocks * BLOCK, generator=generator)
    return normal * torch.randn(blocks * BLOCK, generator=generator).exp()


def chunk_of(kept: int) -> int:
    """The least power of two, from 4,096 to 65,536, of which 64 values or more are kept."""
    return next((c for c in (4096, 8192, 16384, 32768) if kept * c >= 64 * 4096), 65536)


def by_hand(payload: Tensor, n: int, kept: int) -> tuple[list[float], list[list[int]]]:
    """Values and each chunk's indices, read bit by bit as the module says."""
    data, values, all_indices = payload.numpy().tobytes(), [0.0] * n, []
    for start in range(0, n, chunk_of(kept)):
        width = min(chunk_of(kept), n - start)
        k = math.ceil(kept * width / 4096)
        _, low = min((each * k + (width >> each), each) for each in range(17))
        size = 4 + math.ceil((k * (3 + low) + (width >> low)) / 8)
        record, data = data[:size], data[size:]
        levels = torch.frombuffer(bytearray(record[:4]), dtype=torch.bfloat16).tolist()
        stream = int.from_bytes(record[4:], "little")
        bits = [stream >> place & 1 for place in range(8 * (size - 4))]
        codes = [bits[i] + 2 * bits[k + i] for i in range(k)]
        last = [sum(bits[k * (2 + j) + i] << j for j in range(low)) for i in range(k)]
        ones = [place for place, bit in enumerate(bits[k * (2 + low) :]) if bit]
        indices = [(ones[i] - i << low) + last[i] for i in range(k)]
        assert len(ones) == k
        for index, code in zip(indices, codes, strict=True):
            values[start + index] = levels[code >> 1] * (-1 if code & 1 else 1)
        all_indices.append(indices)
    assert data == b""
    return values, all_indices


@pytest.mark.parametrize(
    ("kept", "alone", "chunk", "size"),
    [
        (1, 6, 65536, 36),
        (5, 13, 65536, 140),
        (6, 14, 65536, 164),
        (8, 17, 32768, 108),
        (16, 28, 16384, 100),
        (41, 59, 8192, 113),
        (64, 84, 4096, 84),
        (328, 314, 4096, 314),
        (2048, 1284, 4096, 1284),
    ],
)
def test_bytes_of_chunks(kept: int, alone: int, chunk: int, size: int) -> None:
    assert TopK(kept).payload_bytes(4096) == alone
    assert TopK(kept).payload_bytes(5 * chunk) == 5 * size
    assert TopK(kept).payload_bytes(3 * chunk + 4096) == 3 * size + alone


@given(
    seed=st.integers(0, 1000),
    blocks=st.sampled_from([1, 3, 31, 32, 33, 97, 512, 700]),
    kept=st.sampled_from([1, 5, 30, 64, 77, 2048]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_against_the_format_read_by_hand(seed: int, blocks: int, kept: int) -> None:
    values = draw(seed, blocks)
    n, topk = values.numel(), TopK(kept)
    payload = topk.encode(values)
    assert payload.shape == (topk.payload_bytes(n),)
    expected, indices = by_hand(payload, n, kept)
    decoded = topk.decode(payload, n)
    assert decoded.tolist() == expected
    for number, chosen in enumerate(indices):
        place = slice(chunk_of(kept) * number, chunk_of(kept) * (number + 1))
        chunk = values[place]
        strongest = chunk.abs().topk(len(chosen)).indices
        assert chosen == sorted(strongest.tolist())
        # Signs are kept, and the large are those of the larger level.
        sent = decoded[place]
        assert torch.equal(sent.sign()[chosen], chunk.sign()[chosen])
        by_size = strongest[chunk[strongest].abs().argsort()]
        assert (sent[by_size].abs().diff() >= 0).all()


@pytest.mark.parametrize("kept", [2, 16, 64, 300])
def test_levels_have_the_least_error(kept: int) -> None:
    size = chunk_of(kept)
    values = draw(3, size // BLOCK * 3)
    topk = TopK(kept)
    decoded = topk.decode(topk.encode(values), values.numel())
    for chunk, sent in zip(values.split(size), decoded.split(size), strict=True):
        sizes = np.sort(chunk[sent != 0].abs().double().numpy())
        assert len(sizes) == kept * size // 4096
        halves = ((sizes[:cut], sizes[cut:]) for cut in range(1, len(sizes)))
        least = min(small.var() * len(small) + large.var() * len(large) for small, large in halves)
        error = float((chunk - sent)[sent != 0].double().square().sum())
        # bf16 levels: off by up to one part in 256 each.
        assert error <= least + len(sizes) * float(sent.abs().max() / 2**8) ** 2


@given(seed=st.integers(0, 1000), kept=st.sampled_from([1, 64, 500]), blocks=st.integers(1, 32))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_values_may_be_permuted_within_a_chunk(seed: int, kept: int, blocks: int) -> None:
    values, topk = draw(seed, blocks), TopK(kept)
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(seed))
    sent = topk.decode(topk.encode(values), values.numel())
    permuted = topk.decode(topk.encode(values[order]), values.numel())
    assert torch.equal(permuted, sent[order])


def test_fewer_values_than_are_kept() -> None:
    """What is zero stays nearly unsent: zeros are kept among the small, whose level is theirs."""
    values = torch.zeros(4096)
    values[[7, 4000]] = torch.tensor([3.0, -3.0])
    sent = TopK(64).decode(TopK(64).encode(values), 4096)
    assert torch.equal(sent, values)
    assert not TopK(64).decode(TopK(64).encode(torch.zeros(4096)), 4096).any()


def test_equal_magnitudes_are_exact() -> None:
    values = torch.full((4096,), 0.75)
    values[::2] = -0.75
    for kept in (1, 64, 2048):
        sent = TopK(kept).decode(TopK(kept).encode(values), 4096)
        assert torch.equal(sent[:kept], values[:kept])
        assert not sent[kept:].any()


def test_limits() -> None:
    largest = torch.finfo(torch.float32).max
    for tiny in (2.0**-127, 2.0**-130, 2.0**-140):
        values = torch.cat([torch.full((4096,), largest), torch.full((4096,), tiny)])
        sent = TopK(64).decode(TopK(64).encode(values), 8192)
        assert torch.isfinite(sent).all()
        assert torch.allclose(sent[:64], values[:64], rtol=2**-7)
        assert not sent[4096:].any()


@pytest.mark.parametrize(
    ("level", "allowed"),
    [
        (0.0, True),
        (2.0**-126, True),
        (2.0**-127, False),
        (-0.0, False),
        (-1.0, False),
        (float("nan"), False),
        (float("inf"), False),
    ],
)
def test_levels_that_nobody_writes_are_refused(level: float, allowed: bool) -> None:
    payload = TopK(64).encode(draw(1, 33))
    payload[2:4].view(torch.bfloat16)[0] = level
    if allowed:
        assert torch.isfinite(TopK(64).decode(payload, 33 * BLOCK)).all()
        return
    with pytest.raises(ExchangeError, match="topk:64 payload refused: it has a scale"):
        TopK(64).decode(payload, 33 * BLOCK)


def test_indices_that_nobody_writes_are_refused() -> None:
    payload = TopK(64).encode(draw(2, 1))
    # Two of 128, l = 5: codes in bits 0 to 3, low bits in 4 to 13, ones among 14 to 19.
    assert payload.numel() == 4 + 3
    for low, high, padding, reason in (
        (0, 0b000011, 0, "do not ascend"),  # 0 twice
        (1, 0b000011, 0, "do not ascend"),  # 1, 0
        (0, 0b100001, 0, "do not ascend within chunks of 128"),  # 0, 128
        (0, 0b000111, 0, "does not have 2 indices"),
        (0, 0b000101, 1, "bits behind"),
    ):
        stream = low << 4 | high << 14 | padding << 23
        payload[4:] = torch.frombuffer(bytearray(stream.to_bytes(3, "little")), dtype=torch.uint8)
        with pytest.raises(ExchangeError, match=f"topk:64 payload refused: .*{reason}"):
            TopK(64).decode(payload, BLOCK)
