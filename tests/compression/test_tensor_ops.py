"""The form for GPUs of codecs that pick values, run on a CPU: the same bytes as numpy's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression import tensor_ops
from dilocox.compression.base import BLOCK, Codec
from dilocox.compression.cocktail import Cocktail
from dilocox.compression.top1 import Top1
from dilocox.compression.topk import TopK
from dilocox.errors import ExchangeError

CODECS: tuple[Codec, ...] = (
    *(TopK(kept) for kept in (1, 5, 64, 77, 410, 2048)),
    *(Top1(block) for block in (2, 3, 64, 100, 600, 32768)),
    Cocktail(seed=3, place=0),
    Cocktail(seed=2**64 - 5, place=128),
)
BLOCKS = (1, 3, 31, 32, 33, 97, 513, 1100)
"""Numbers of blocks of 128: whole chunks, short last ones, several chunks, several records."""

codecs = st.sampled_from(CODECS)
blocks = st.sampled_from(BLOCKS)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of a few chunks each."""
    monkeypatch.setattr(tensor_ops, "PIECE", 1 << 14)


def without_numpy(call: str, codec: Codec, *given: object) -> Tensor:
    """What a method of `codec` gives in tensor operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_ops, "numpy_reaches", lambda tensor: False)
        found: Tensor = getattr(codec, call)(*given)
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Signs of zeros and all."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(codec: Codec, values: Tensor) -> None:
    """Payload and decoded values are the same in both forms."""
    n, before = values.numel(), values.clone()
    payload = codec.encode(values)
    assert same_bits(without_numpy("encode", codec, values), payload)
    assert same_bits(values, before)
    assert same_bits(without_numpy("decode", codec, payload, n), codec.decode(payload, n))


def draw(seed: int, count: int) -> Tensor:
    """Heavy-tailed values."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count * BLOCK, generator=generator)
    return normal * torch.randn(count * BLOCK, generator=generator).exp()


@given(codec=codecs, count=blocks, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_values_of_all_sizes(codec: Codec, count: int, seed: int) -> None:
    check(codec, draw(seed, count))


@given(codec=codecs, count=blocks, seed=st.integers(0, 10**6), kinds=st.integers(1, 5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ties_and_zeros_of_both_signs(codec: Codec, count: int, seed: int, kinds: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    few = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5])[-kinds:]
    drawn = torch.randint(0, len(few), (count * BLOCK,), generator=generator)
    check(codec, few[drawn])


@given(codec=codecs, count=blocks, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_finite_bits(codec: Codec, count: int, seed: int) -> None:
    """Subnormal numbers and the largest ones beside each other."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count * BLOCK,), generator=generator)
    values = bits.to(torch.int32).view(torch.float32)
    check(codec, torch.where(values.isfinite(), values, 0.0))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name}/{codec.numbers}")
def test_values_that_are_all_alike(codec: Codec) -> None:
    count = 66 * BLOCK
    largest = torch.finfo(torch.float32).max
    for value in (0.0, -0.0, 1.0, -(2.0**100), 2.0**-100, 2.0**-127, -(2.0**-149), largest):
        check(codec, torch.full((count,), value))
    one = torch.zeros(count)
    one[-1] = -3.0
    check(codec, one)
    huge = draw(1, 66) * 2.0**100
    check(codec, torch.where(draw(2, 66) > 0, huge, draw(3, 66) * 2.0**-100))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name}/{codec.numbers}")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_gives_a_payload_of_the_right_size(
    codec: Codec, bad: float
) -> None:
    values = draw(4, 33)
    values[::50] = bad
    payload = without_numpy("encode", codec, values)
    assert payload.shape == (codec.payload_bytes(values.numel()),)
    values.fill_(bad)
    assert without_numpy("encode", codec, values).shape == payload.shape


@given(codec=codecs, count=blocks, seed=st.integers(0, 10**6), flips=st.integers(1, 4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_same_payloads_are_refused(codec: Codec, count: int, seed: int, flips: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = count * BLOCK
    payload = codec.encode(draw(seed, count))
    for place in torch.randint(0, payload.numel(), (flips,), generator=generator).tolist():
        payload[place] ^= int(torch.randint(1, 256, (1,), generator=generator))
    expected, reason = None, ""
    try:
        expected = codec.decode(payload, n)
    except ExchangeError as error:
        reason = str(error)
    if expected is not None:
        assert same_bits(without_numpy("decode", codec, payload, n), expected)
        return
    with pytest.raises(ExchangeError, match="payload refused") as found:
        without_numpy("decode", codec, payload, n)
    # Where several reasons hold, each form may find another first.
    assert str(found.value).split(":")[:2] == reason.split(":")[:2]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name}/{codec.numbers}")
def test_random_bytes_are_refused(codec: Codec) -> None:
    size = codec.payload_bytes(700 * BLOCK)
    generator = torch.Generator().manual_seed(5)
    payload = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
    with pytest.raises(ExchangeError, match="payload refused"):
        without_numpy("decode", codec, payload, 700 * BLOCK)


def test_each_reason_is_told() -> None:
    topk = TopK(64)
    good = topk.encode(draw(2, 1))
    for low, high, padding, reason in (
        (0, 0b000011, 0, "do not ascend within chunks of 128"),
        (0, 0b000111, 0, "does not have 2 indices"),
        (0, 0b000101, 1, "bits behind"),
    ):
        stream = low << 4 | high << 14 | padding << 23
        payload = good.clone()
        payload[4:] = torch.frombuffer(bytearray(stream.to_bytes(3, "little")), dtype=torch.uint8)
        with pytest.raises(ExchangeError, match=f"topk:64 payload refused: .*{reason}"):
            without_numpy("decode", topk, payload, BLOCK)
    for level in (2.0**-127, -0.0, -1.0, float("nan"), float("inf")):
        payload = good.clone()
        payload[2:4].view(torch.bfloat16)[0] = level
        with pytest.raises(ExchangeError, match="topk:64 payload refused: it has a scale"):
            without_numpy("decode", topk, payload, BLOCK)


def test_an_output_is_filled() -> None:
    for codec in CODECS:
        values = draw(6, 33)
        n = values.numel()
        payload = torch.full((codec.payload_bytes(n),), 255, dtype=torch.uint8)
        assert without_numpy("encode", codec, values, payload) is payload
        assert same_bits(payload, codec.encode(values))
        out = torch.full((n,), 7.0)
        assert without_numpy("decode", codec, payload, n, out) is out
        assert same_bits(out, codec.decode(payload, n))
