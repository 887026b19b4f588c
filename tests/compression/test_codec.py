"""Every codec: exact sizes, bounded errors, and the same bytes everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.base import BLOCK, Codec, all_zero, first_non_finite, require_finite
from dilocox.compression.registry import CODECS, codec
from dilocox.errors import ConfigError, ExchangeError
from tests.support.patterns import patterns

ALL = pytest.mark.parametrize("name", list(CODECS))
BLOCKED = pytest.mark.parametrize("name", ["int8", "int4", "int2"])
QUANTISED = pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
LARGEST_FP32 = torch.finfo(torch.float32).max


def draw(seed: int, blocks: int, exponent: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(blocks * BLOCK, generator=generator) * 2.0**exponent


def round_trip(chosen: Codec, values: Tensor) -> Tensor:
    return chosen.decode(chosen.encode(values), values.numel())


def scales_of(payload: Tensor, n: int) -> Tensor:
    """fp32 [n, 1] per block, read from the payload as its format says."""
    return payload[: n // BLOCK * 2].view(torch.bfloat16).float().view(-1, 1)


def test_sizes_are_those_of_the_formats() -> None:
    sizes = {name: each.payload_bytes(1024) for name, each in CODECS.items()}
    assert sizes == {
        "none": 4096,
        "fp16": 2048,
        "bf16": 2048,
        "int8": 1040,
        "int4": 528,
        "int2": 272,
    }
    assert len({each.identifier for each in CODECS.values()}) == len(CODECS)


def test_unknown_codec_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'int5'.*int4"):
        codec("int5")


@ALL
@given(seed=st.integers(0, 1000), blocks=st.integers(0, 40))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_payload_has_exactly_the_announced_bytes(name: str, seed: int, blocks: int) -> None:
    values = draw(seed, blocks)
    before = values.clone()
    payload = codec(name).encode(values)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec(name).payload_bytes(values.numel()),)
    assert torch.equal(values, before)
    decoded = codec(name).decode(payload, values.numel())
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_none_is_the_identity_on_bits(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (512,), generator=generator, dtype=torch.int32)
    # An exponent of all ones would be a NaN or an infinity.
    bits = torch.where(bits >> 23 & 255 == 255, bits ^ (1 << 23), bits)
    values = bits.view(torch.float32)
    assert torch.equal(round_trip(codec("none"), values).view(torch.int32), bits)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_payloads_are_refused(name: str, bad: float) -> None:
    dtypes = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    written = torch.zeros(256, dtype=dtypes[name])
    written[200] = bad
    with pytest.raises(ExchangeError, match=f"{name} payload refused: value 200 is {bad}"):
        codec(name).decode(written.view(torch.uint8), 256)


@BLOCKED
@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 2.0**-126, 2.0**127 * 1.5]
)
def test_scales_that_nobody_writes_are_refused(name: str, bad: float) -> None:
    payload = codec(name).encode(draw(1, 3))
    payload[:6].view(torch.bfloat16)[1] = bad
    with pytest.raises(ExchangeError, match=f"{name} payload refused: it has a scale"):
        codec(name).decode(payload, 3 * BLOCK)


@QUANTISED
def test_the_code_that_nobody_writes_cannot_overflow(name: str, largest: int) -> None:
    payload = codec(name).encode(torch.full((BLOCK,), LARGEST_FP32))
    payload[2:] = 128 if name == "int8" else 136
    with pytest.raises(ExchangeError, match=f"{name} payload refused: value 0 is -inf"):
        codec(name).decode(payload, BLOCK)


@QUANTISED
@given(seed=st.integers(0, 1000), blocks=st.integers(1, 9), exponent=st.integers(-100, 100))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_error_is_at_most_half_a_step(
    name: str, largest: int, seed: int, blocks: int, exponent: int
) -> None:
    values = draw(seed, blocks, exponent)
    payload = codec(name).encode(values)
    scales = scales_of(payload, values.numel()).double()
    decoded = codec(name).decode(payload, values.numel()).double().view(-1, BLOCK)
    exact = values.double().view(-1, BLOCK)
    assert ((decoded - exact).abs() <= scales * 0.5 * (1 + 2**-15)).all()
    # The scale is no wider than the block needs, so half a step is a tight promise.
    needed = exact.abs().amax(1, keepdim=True) / largest
    assert (scales <= needed * (1 + 2**-8)).all()
    # Code times scale is exact: the quotient is a whole number, and in range.
    codes = decoded / scales
    assert torch.equal(codes, codes.round())
    assert codes.abs().max() <= largest


@QUANTISED
def test_every_code_survives_packing(name: str, largest: int) -> None:
    codes = torch.arange(-largest, largest + 1).repeat(BLOCK)[: (2 * largest + 1) * BLOCK].float()
    codes = codes.view(-1, BLOCK).contiguous()
    codes[:, 0] = largest
    assert torch.equal(round_trip(codec(name), codes.view(-1)), codes.view(-1))


@QUANTISED
def test_ties_go_to_the_even_code(name: str, largest: int) -> None:
    values = torch.zeros(BLOCK)
    values[:8] = torch.tensor([largest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 4.5])
    expected = torch.tensor([largest, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 4.0])
    assert torch.equal(round_trip(codec(name), values)[:8], expected)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "int2"])
@given(seed=st.integers(0, 1000), exponent=st.integers(-60, 60))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_scaling_by_a_power_of_two_commutes(name: str, seed: int, exponent: int) -> None:
    values = draw(seed, 3)
    scaled = round_trip(codec(name), values * 2.0**exponent)
    assert torch.equal(scaled, round_trip(codec(name), values) * 2.0**exponent)


@ALL
def test_zero_blocks_are_zero(name: str) -> None:
    values = draw(1, 3)
    values[BLOCK : 2 * BLOCK] = 0
    decoded = round_trip(codec(name), values)
    assert not decoded[BLOCK : 2 * BLOCK].any()
    assert torch.isfinite(decoded).all()
    assert decoded[:BLOCK].any()


@QUANTISED
def test_largest_fp32_stays_finite(name: str, largest: int) -> None:
    values = torch.full((BLOCK,), LARGEST_FP32)
    values[::2] = -LARGEST_FP32
    decoded = round_trip(codec(name), values)
    assert torch.isfinite(decoded).all()
    assert torch.allclose(decoded, values, rtol=0.5 / largest)


@BLOCKED
@given(bits=st.integers(0x7F000000, 0x7F7FFFFF))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_large_value_overflows(name: str, bits: int) -> None:
    values = torch.full((BLOCK,), bits, dtype=torch.int32).view(torch.float32)
    assert torch.isfinite(round_trip(codec(name), values)).all()


@QUANTISED
@pytest.mark.parametrize("exponent", range(-149, -110, 3))
def test_tiny_values_keep_the_bound(name: str, largest: int, exponent: int) -> None:
    values = draw(3, 2).double().mul(2.0**exponent).float()
    payload = codec(name).encode(values)
    scales = scales_of(payload, values.numel()).double()
    assert (scales >= 2.0**-125).all()
    error = (round_trip(codec(name), values).double() - values.double()).abs()
    assert (error.view(-1, BLOCK) <= scales * 0.5 * (1 + 2**-15)).all()


@QUANTISED
def test_flushing_denormals_changes_nothing(name: str, largest: int) -> None:
    values = torch.cat(
        [draw(seed, 1).double().mul(2.0**-e).float() for seed, e in enumerate(range(110, 149))]
    )
    plain = codec(name).encode(values)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = codec(name).encode(values)
        decoded = codec(name).decode(plain, values.numel())
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain, flushed)
    assert torch.equal(decoded, codec(name).decode(plain, values.numel()))


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_beyond_the_format_saturates(name: str, dtype: torch.dtype) -> None:
    values = torch.zeros(BLOCK)
    top = torch.finfo(dtype).max
    values[:6] = torch.tensor([LARGEST_FP32, -LARGEST_FP32, top, -top, top * (1 + 2**-12), 1.0])
    expected = torch.tensor([top, -top, top, -top, top, 1.0])
    assert torch.equal(round_trip(codec(name), values)[:6], expected)


@ALL
def test_given_output_is_used_and_equal(name: str) -> None:
    chosen, values = codec(name), draw(5, 7)
    payload = torch.empty(chosen.payload_bytes(values.numel()), dtype=torch.uint8)
    assert chosen.encode(values, out=payload) is payload
    decoded = torch.empty_like(values)
    assert chosen.decode(payload, values.numel(), out=decoded) is decoded
    assert torch.equal(payload, chosen.encode(values))
    assert torch.equal(decoded, round_trip(chosen, values))


@ALL
def test_parts_encode_like_the_whole(name: str) -> None:
    """What `reduce` relies on, and what piecewise work inside a codec must not change."""
    values, cut = patterns(3 * (1 << 17) + 5 * BLOCK), 7 * BLOCK
    whole = round_trip(codec(name), values)
    parts = [round_trip(codec(name), part.clone()) for part in (values[:cut], values[cut:])]
    assert torch.equal(whole, torch.cat(parts))


@ALL
def test_payload_at_an_odd_address_decodes(name: str) -> None:
    values = draw(6, 2)
    payload = codec(name).encode(values)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
    decoded = codec(name).decode(shifted, values.numel())
    assert torch.equal(decoded, codec(name).decode(payload, values.numel()))


@ALL
def test_wrong_shapes_are_refused(name: str) -> None:
    chosen = codec(name)
    with pytest.raises(ExchangeError, match="blocks of 128"):
        chosen.encode(torch.zeros(100))
    with pytest.raises(ExchangeError, match="flat contiguous fp32"):
        chosen.encode(torch.zeros(128, dtype=torch.float64))
    with pytest.raises(ExchangeError, match="flat contiguous fp32"):
        chosen.encode(torch.zeros(2, 128))
    with pytest.raises(ExchangeError, match="flat contiguous fp32"):
        chosen.encode(torch.zeros(256)[::2])
    payload = chosen.encode(torch.zeros(256))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload.to(torch.int32)):
        with pytest.raises(ExchangeError, match=f"{name} payload of 256 values must be"):
            chosen.decode(wrong, 256)
    with pytest.raises(ExchangeError, match="output must be"):
        chosen.encode(torch.zeros(256), out=payload[:-2])
    room = torch.empty(payload.numel() + 2, dtype=torch.uint8)
    with pytest.raises(ExchangeError, match="must start at a multiple of 4"):
        chosen.encode(torch.zeros(256), out=room[2:])


@given(
    position=st.integers(0, 299), bad=st.sampled_from([float("nan"), float("inf"), -float("inf")])
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_first_non_finite_is_found(position: int, bad: float) -> None:
    values = torch.arange(300, dtype=torch.float32)
    assert first_non_finite(values) is None
    values[position] = bad
    values[-1] = float("nan")
    assert first_non_finite(values) == position
    with pytest.raises(ExchangeError, match=f"fragment 3: value {position} of 300"):
        require_finite(values, "fragment 3")


def test_finite_extremes_are_finite() -> None:
    assert first_non_finite(torch.tensor([LARGEST_FP32, -LARGEST_FP32, 1e-45])) is None
    assert first_non_finite(torch.empty(0)) is None


@pytest.mark.parametrize("value", [1.4e-45, -1.4e-45, 3.0, math.nan, math.inf])
def test_what_is_not_all_zero(value: float) -> None:
    values = torch.zeros(1000)
    values[3] = -0.0
    assert all_zero(values)
    assert all_zero(torch.empty(0))
    values[997] = value
    assert not all_zero(values)
    require_finite(torch.zeros(1), "fragment 0")
