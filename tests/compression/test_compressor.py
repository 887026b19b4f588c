"""Parts of a buffer: exact sizes, gaps, error feedback, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.cocktail import Cocktail
from dilocox.compression.compressor import Part
from dilocox.errors import ConfigError, ExchangeError
from tests.support.patterns import ODD, SINGLE, filled, single

ALL = pytest.mark.parametrize("spec", SINGLE)
BITS = {"none": 32.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.125, "int4": 4.125, "int2": 2.125}


def draw(seed: int, geometry: Geometry = ODD) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return filled(geometry, torch.randn(geometry.length, generator=generator))


def whole(spec: str, seed: int = 3) -> Part:
    return single(spec, ODD).part(0, ODD.length, seed)


def sparse_bytes(spec: str, n: int) -> int:
    """Size of n values that are thinned out, written anew from the formats."""
    if spec.startswith("top1"):
        return top1_bytes(int(spec.removeprefix("top1:")), n)
    if spec == "cocktail":
        kept, bits, head, n = 820, 4, 2, math.ceil(n / 10)
    else:
        kept, bits, head = int(spec.removeprefix("topk:")), 2, 4
    size, chunk = 0, 4096
    while kept * chunk < 64 * 4096 and chunk < 65536:
        chunk *= 2
    for c in [min(chunk, n - start) for start in range(0, n, chunk)]:
        k = math.ceil(kept * c / 4096)
        size += head + math.ceil(min(k * (bits + 1 + low) + (c >> low) for low in range(17)) / 8)
    return size


def top1_bytes(block: int, n: int) -> int:
    blocks, size = math.ceil(n / block), 0
    for left in range(blocks, 0, -64):
        here = min(left, 64)
        size += 4 + math.ceil((2 * here + math.ceil(4 * math.log2(block + 1)) * -(-here // 4)) / 8)
    return size


def expected_bytes(spec: str, n: int) -> int:
    return int(BITS[spec] * n / 8) if spec in BITS else sparse_bytes(spec, n)


@ALL
@given(cuts=st.tuples(st.integers(0, 233), st.integers(0, 233)), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_part_has_its_exact_size_and_decodes(
    spec: str, cuts: tuple[int, int], seed: int
) -> None:
    start, end = sorted(cut * 128 for cut in cuts)
    part = single(spec, ODD).part(start, end, seed)
    assert part.values == end - start
    assert part.payload_bytes == expected_bytes(spec, end - start)
    payload = part.encode(draw(seed)[start:end].clone())
    assert payload.dtype == torch.uint8
    assert payload.shape == (part.payload_bytes,)
    sent = part.decode(payload)
    assert sent.dtype == torch.float32
    assert sent.shape == (end - start,)
    for low, high in ODD.gaps():
        assert not sent[max(low - start, 0) : max(high - start, 0)].any()


@ALL
def test_payloads_do_not_depend_on_shapes(spec: str) -> None:
    """1-D and small tensors are encoded like all others; only gaps are zero behind it."""
    buffer, part = draw(1), whole(spec)
    alike = single(spec, Geometry.flat(ODD.length)).part(0, ODD.length, 3)
    payload = part.encode(buffer)
    assert torch.equal(payload, alike.encode(buffer))
    assert torch.equal(part.decode(payload), filled(ODD, alike.decode(payload)))


@ALL
def test_error_feedback_loses_nothing(spec: str) -> None:
    """What was sent and what is left over at the end are what came in, summed over rounds; and what
    is sent is a part of u, in its own size: nothing is left over that had been sent already."""
    generator = torch.Generator().manual_seed(1)
    residual, sent, came = torch.zeros(ODD.length), torch.zeros(ODD.length), torch.zeros(ODD.length)
    for count in range(12):
        fresh = filled(ODD, torch.randn(ODD.length, generator=generator))
        part = whole(spec, seed=count)
        u = fresh + residual
        decoded = part.decode(part.encode(u))
        residual = u - decoded
        sent, came = sent.double() + decoded, came.double() + fresh
        assert residual.square().sum() < u.square().sum()
        inside = (decoded.double() * u).sum() / decoded.double().square().sum()
        assert inside == pytest.approx(1.0, abs=0.04)
    assert torch.allclose(sent + residual, came, rtol=0, atol=1e-5)
    assert sent.any()
    # Coarse codecs hold back much, but each of them less than all that came.
    assert residual.square().sum() < came.square().sum()


@ALL
@given(seed=st.integers(0, 100), exponent=st.integers(-40, 40))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_scaling_by_a_power_of_two_commutes(spec: str, seed: int, exponent: int) -> None:
    if spec == "fp16":
        exponent = exponent // 20
    buffer, part = draw(seed), whole(spec)
    if spec == "fp16":
        buffer = torch.where(buffer.abs() < 2**-8, 0.0, buffer)
    scaled = part.decode(part.encode(buffer * 2.0**exponent))
    assert torch.equal(scaled, part.decode(part.encode(buffer)) * 2.0**exponent)


@ALL
def test_encoding_leaves_its_input_alone_and_repeats(spec: str) -> None:
    buffer, part = draw(2), whole(spec)
    before = buffer.clone()
    first = part.encode(buffer)
    assert torch.equal(buffer, before)
    given_payload = torch.full((part.payload_bytes,), 9, dtype=torch.uint8)
    assert part.encode(buffer, out=given_payload) is given_payload
    assert torch.equal(first, given_payload)
    decoded = part.decode(first)
    assert torch.equal(decoded, part.decode(first))
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), first])[1:]
    assert torch.equal(decoded, part.decode(odd))
    room = torch.full((ODD.length,), 7.0)
    assert part.decode(first, out=room) is room
    assert torch.equal(decoded, room)


@ALL
def test_non_finite_input_gives_a_payload_of_the_right_size(spec: str) -> None:
    part = whole(spec)
    for bad in (float("nan"), float("inf")):
        buffer = draw(2)
        buffer[128:12000:7] = bad
        assert part.encode(buffer).shape == (part.payload_bytes,)


@ALL
@given(seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_random_bytes_are_refused_or_finite(spec: str, seed: int) -> None:
    part = whole(spec)
    junk = np.random.default_rng(seed).integers(0, 256, part.payload_bytes, dtype=np.uint8)
    refused_or_finite(part, torch.from_numpy(junk))


@ALL
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_damaged_payloads_are_refused_or_finite(spec: str, data: st.DataObject) -> None:
    part = single(spec, ODD).part(128, 128 * 50, 3)
    payload = part.encode(draw(4)[128 : 128 * 50].clone())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, part.payload_bytes - 1))
        payload[position] = data.draw(st.integers(0, 255))
    refused_or_finite(part, payload)


def refused_or_finite(part: Part, payload: Tensor) -> None:
    reason: str | None = None
    try:
        decoded = part.decode(payload)
    except ExchangeError as error:
        reason = str(error)
    if reason is not None:
        assert "payload refused" in reason
        assert "\n" not in reason
        return
    assert decoded.shape == (part.values,)
    assert torch.isfinite(decoded).all()


@ALL
def test_wrong_sizes_are_refused(spec: str) -> None:
    part = whole(spec)
    payload = part.encode(draw(5))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload.to(torch.int16)):
        with pytest.raises(ExchangeError, match=f"{spec} payload of 29824 values must be"):
            part.decode(wrong)
    with pytest.raises(ExchangeError, match="a part of 29824 values was given 128"):
        part.encode(torch.zeros(128))
    with pytest.raises(ExchangeError, match="flat contiguous fp32"):
        part.encode(torch.zeros(ODD.length, dtype=torch.float64))


@ALL
def test_parts_must_lie_in_the_buffer(spec: str) -> None:
    for start, end in ((-128, 128), (0, ODD.length + 128), (256, 128), (0, 100), (5, 128)):
        with pytest.raises(ExchangeError, match=f"values {start} to {end} are not whole"):
            single(spec, ODD).part(start, end)


def test_only_cocktail_draws_from_the_seed() -> None:
    buffer = draw(6)
    for spec in SINGLE:
        payloads = [whole(spec, seed).encode(buffer) for seed in (1, 2)]
        assert torch.equal(*payloads) is (spec != "cocktail")


def test_cocktail_draws_by_place_in_the_buffer() -> None:
    for start, end in ((0, ODD.length), (12800, 25600)):
        assert single("cocktail", ODD).part(start, end, 9).codec == Cocktail(9, start)


def test_texts_and_identifiers() -> None:
    identifiers = {spec: single(spec, ODD).identifier for spec in SINGLE}
    assert len(set(identifiers.values())) == 9
    assert {identifiers[f"topk:{kept}"] for kept in (1, 64, 77, 2048)} == {7}
    assert {identifiers[f"top1:{block}"] for block in (2, 64, 600)} == {9}
    assert single("topk", ODD).name == "topk:64"
    assert single("top1", ODD).name == "top1:64"
    assert single("int4", ODD) is single("int4", ODD)
    with pytest.raises(ConfigError, match="no codec 'int3'"):
        single("int3", ODD)


@ALL
def test_an_empty_buffer_has_an_empty_payload(spec: str) -> None:
    for geometry in (Geometry((), (), 0), Geometry(((0, 5),), (0,), 0)):
        part = single(spec, geometry).part(0, 0)
        payload = part.encode(torch.empty(0))
        assert payload.shape == (0,)
        assert part.decode(payload).shape == (0,)
