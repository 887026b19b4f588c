"""int2: really two bits, and the scale with the least squared error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.base import BLOCK
from dilocox.compression.registry import codec

INT2 = codec("int2")


def round_trip(values: Tensor) -> Tensor:
    return INT2.decode(INT2.encode(values), values.numel())


def by_hand(payload: Tensor, n: int) -> Tensor:
    """What a payload stands for, read value by value as the format says."""
    scales = payload[: n // 64].view(torch.bfloat16).tolist()
    codes = payload[n // 64 :].tolist()
    values = []
    for place in range(n):
        block, inside = divmod(place, BLOCK)
        byte = codes[32 * block + inside % 32]
        values.append(((byte >> (2 * (inside // 32))) % 4 - 1.5) * scales[block])
    return torch.tensor(values)


def best_error(values: Tensor) -> Tensor:
    """Least squared error of each block over a fine grid of scales, fp64 [blocks]."""
    blocks = values.double().view(-1, BLOCK)
    top = blocks.abs().amax(1, keepdim=True)
    least = torch.full((len(blocks),), torch.inf, dtype=torch.float64)
    for share in torch.linspace(0.01, 1.4, 400):
        scale = top * share
        level = torch.where(blocks.abs() >= scale, 1.5, 0.5) * scale
        least = torch.minimum(least, ((blocks.abs() - level) ** 2).sum(1))
    return least


def kinds(blocks: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(blocks * BLOCK, generator=generator)
    uniform = torch.rand(blocks * BLOCK, generator=generator)
    chi = torch.randn(3, blocks * BLOCK, generator=generator).square().mean(0).sqrt()
    spread = torch.randn(blocks * BLOCK, generator=generator).exp()
    return {
        "normal": normal,
        "laplacian": normal.sign() * -uniform.clamp_min(1e-6).log(),
        "uniform": uniform * 2 - 1,
        "student 3": normal / chi,
        "normal of many widths": normal * spread,
        "two thirds zero": normal * (uniform > 2 / 3),
    }


@pytest.mark.parametrize("kind", list(kinds(1)))
def test_the_error_is_nearly_the_least_possible(kind: str) -> None:
    values = kinds(600)[kind]
    error = (round_trip(values).double() - values.double()).square().sum()
    assert error <= 1.025 * best_error(values).sum()


@given(seed=st.integers(0, 1000), blocks=st.integers(1, 3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_decoding_is_the_documented_format(seed: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(blocks * BLOCK, generator=generator)
    payload = INT2.encode(values)
    assert payload.numel() == blocks * 34
    assert torch.equal(INT2.decode(payload, values.numel()), by_hand(payload, values.numel()))


@given(seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_what_was_decoded_is_encoded_as_itself(seed: int) -> None:
    """Values on the levels survive if the block uses them as the scale's choice expects."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    # A third at the outer levels is the share of normal values beyond the scale.
    outer = torch.rand(BLOCK, generator=generator) < 1 / 3
    negative = torch.rand(BLOCK, generator=generator) < 0.5
    values = levels[torch.where(negative, 1, 2) + torch.where(negative, -1, 1) * outer] * 0.75
    assert torch.equal(round_trip(values), values)


def test_each_value_keeps_its_sign_and_the_nearer_level() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(20 * BLOCK, generator=generator)
    payload = INT2.encode(values)
    scale = payload[:40].view(torch.bfloat16).float().view(-1, 1)
    decoded = INT2.decode(payload, values.numel()).view(-1, BLOCK)
    blocks = values.view(-1, BLOCK)
    assert torch.equal(decoded.sign(), blocks.sign())
    inside = blocks.abs() < scale * (1 - 2**-20)
    outside = blocks.abs() > scale * (1 + 2**-20)
    assert torch.equal(decoded.abs()[inside], (0.5 * scale).expand_as(blocks)[inside])
    assert torch.equal(decoded.abs()[outside], (1.5 * scale).expand_as(blocks)[outside])


def test_limits() -> None:
    largest = torch.finfo(torch.float32).max
    assert torch.equal(round_trip(torch.full((BLOCK,), 2.0**126)), torch.full((BLOCK,), 2.0**126))
    assert torch.isfinite(round_trip(torch.full((BLOCK,), largest))).all()
    # What no scale can stand for becomes zero, and positive zero.
    for tiny in (0.0, -0.0, 1e-45, -(2.0**-127)):
        decoded = round_trip(torch.full((BLOCK,), tiny))
        assert not decoded.view(torch.int32).any()


def test_flushing_denormals_does_not_change_what_is_decoded() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.cat(
        [torch.randn(BLOCK, generator=generator).double().mul(2.0**-e) for e in range(110, 149)]
    ).float()
    payload = INT2.encode(values)
    decoded = INT2.decode(payload, values.numel())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = INT2.decode(payload, values.numel())
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int32), decoded.view(torch.int32))
