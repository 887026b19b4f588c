"""What all codecs of fragments have in common: their phases, and parts that encode and decode."""

from __future__ import annotations

import pytest
import torch

from dilocox.compression import Geometry, LowRank, compressor, frame_bytes, pack_frame
from dilocox.errors import ExchangeError

GEOMETRY = Geometry(((64, 96), (128,)), (0, 6144), 6272)


def values() -> torch.Tensor:
    return torch.randn(GEOMETRY.length, generator=torch.Generator().manual_seed(1))


def basis_of(low: LowRank) -> torch.Tensor:
    return low.orthonormalise([low.project(values(), low.first_warm())])


@pytest.mark.parametrize("spec", ["none", "int4", "topk:64", "int8+moments"])
def test_a_codec_without_a_basis_has_one_phase(spec: str) -> None:
    codec = compressor(spec, GEOMETRY)
    assert codec.agreement is None
    part, (payload,) = codec.part(0, GEOMETRY.length, 3), codec.phases
    assert frame_bytes(payload) == frame_bytes(part)
    assert payload.name == codec.name
    assert payload.identifier == codec.identifier


@pytest.mark.parametrize("spec", ["lowrank:2", "lowrank:4:int8"])
def test_the_last_of_three_phases_is_a_part_on_the_basis(spec: str) -> None:
    codec = compressor(spec, GEOMETRY)
    low = codec.agreement
    assert low is not None
    assert low.matrices == 1
    assert codec.phases == (low.factor_part, low.basis_part, low.payload_part)
    basis, u = basis_of(low), values()
    part, last = codec.part(0, GEOMETRY.length, 3, basis), codec.phases[-1]
    payload = part.encode(u)
    assert torch.equal(payload, low.encode(u, basis))
    assert torch.equal(part.decode(payload), low.decode(payload, basis))
    assert torch.equal(pack_frame(part, payload), pack_frame(last, payload)), "the same header"
    into, out = torch.empty_like(payload), torch.empty_like(u)
    assert part.encode(u, into) is into
    assert torch.equal(into, payload)
    assert part.decode(payload, out) is out
    assert torch.equal(out, low.decode(payload, basis))


def test_low_rank_encodes_nothing_without_a_basis_and_no_half_buffer() -> None:
    codec = compressor("lowrank:2", GEOMETRY)
    low = codec.agreement
    assert low is not None
    with pytest.raises(ExchangeError, match="on a basis that the sites have agreed on"):
        codec.part(0, GEOMETRY.length)
    with pytest.raises(ExchangeError, match="only whole buffers"):
        codec.part(0, 6144, basis=basis_of(low))
    with pytest.raises(ExchangeError, match="second moments must be none"):
        codec.carrying(torch.zeros(4, dtype=torch.uint8))
