"""Second moments behind payloads: a byte each, and values that decode as without them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.compression import Compressor, Geometry, compressor, frame_bytes, pack_frame
from dilocox.compression.second_moments import (
    PERIOD,
    carried,
    due_rows,
    from_bytes,
    row_counts,
    to_bytes,
)
from dilocox.config.codec_spec import Spec, parse_spec
from dilocox.errors import ConfigError, ExchangeError

SHAPES = ((70, 40), (128,), (2, 3, 16), (0, 8))
GEOMETRY = Geometry(SHAPES, (0, 2816, 2944, 3072), 3072)


@settings(derandomize=True, deadline=None)
@given(st.floats(2.0**-60, 14.0, width=32))
def test_a_byte_is_an_eighth_off_at_most(value: float) -> None:
    code = to_bytes(torch.tensor([value]))
    back = float(from_bytes(code))
    assert 0.9 <= back / value <= 1.125
    assert torch.equal(to_bytes(torch.tensor([back])), code)


def test_bytes_by_hand() -> None:
    values = torch.tensor([0.0, 2.0**-61, 2.0**-60, 1.0, 1.25, 1e30])
    # 1.0 has the exponent 127: 4 x 127 - 267 = 241; a quarter more is the next.
    assert to_bytes(values).tolist() == [0, 0, 1, 241, 242, 255]
    assert from_bytes(torch.tensor([0, 241], dtype=torch.uint8)).tolist() == [0.0, 1.125]


def test_rows_are_those_of_matrices() -> None:
    assert row_counts(SHAPES) == [70, 0, 6, 0]
    assert due_rows(GEOMETRY) == math.ceil(70 / PERIOD) + 1 == 4
    assert due_rows(Geometry.flat(256)) == 0


@pytest.mark.parametrize("spec", ["int4", "int2", "none", "topk:64", "cocktail"])
def test_values_are_those_of_the_codec(spec: str) -> None:
    plain, with_moments = compressor(spec, GEOMETRY), compressor(f"{spec}+moments", GEOMETRY)
    assert isinstance(plain, Compressor)
    assert isinstance(with_moments, Compressor)
    values = torch.randn(GEOMETRY.length, generator=torch.manual_seed(0))
    moments = torch.tensor([3, 0, 7, 255], dtype=torch.uint8)
    part, own = with_moments.carrying(moments).part(0, 3072, 7), plain.part(0, 3072, 7)
    assert part.name == f"{spec}+moments" == parse_spec(f"{spec}+moments").text
    assert part.identifier == 256 + own.identifier
    payload = part.encode(values)
    assert len(payload) == part.payload_bytes == own.payload_bytes + 4
    assert frame_bytes(part) == len(pack_frame(part, payload))
    assert torch.equal(payload[:-4], own.encode(values))
    assert torch.equal(carried(payload, GEOMETRY), moments)
    # Who only decodes knows no moments of his own.
    other = with_moments.part(0, 3072, 7)
    assert torch.equal(other.decode(payload), own.decode(own.encode(values)))
    assert carried(other.encode(values), GEOMETRY).tolist() == [0, 0, 0, 0]
    with pytest.raises(ExchangeError, match="payload of 3072 values must be"):
        other.decode(payload[:-1])
    with pytest.raises(ExchangeError, match="whole buffers"):
        with_moments.part(0, 128)
    for wrong in (torch.zeros(5, dtype=torch.uint8), torch.zeros(4)):
        with pytest.raises(ExchangeError, match=r"second moments must be uint8 \[4\], got"):
            with_moments.carrying(wrong)
    with pytest.raises(ExchangeError, match="second moments must be none"):
        plain.carrying(moments)
    ready = torch.empty(part.payload_bytes, dtype=torch.uint8)
    assert torch.equal(part.encode(values, out=ready), payload)
    for unfit in (ready[:-1].clone(), torch.empty(part.payload_bytes)):
        with pytest.raises(ExchangeError, match="output must be flat contiguous"):
            part.encode(values, out=unfit)


def test_low_rank_carries_none() -> None:
    with pytest.raises(ConfigError, match="no codec 'lowrank:8\\+moments'"):
        parse_spec("lowrank:8+moments")
    assert parse_spec("topk+moments") == replace(Spec("topk", 64), moments=True)
    with pytest.raises(ConfigError):
        parse_spec("int4+moments+moments")
