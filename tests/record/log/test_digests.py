"""Digests of tensors and states."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.log.digests import TensorDigest, stage_root, tensor_digest
from dilocox.record.log.merkle import leaf_hash, node_hash


def test_by_hand() -> None:
    """Two tensors of known bytes, hashed here from the definition."""
    one = tensor_digest("b", torch.tensor([1.0, -2.0]))
    two = tensor_digest("a", torch.tensor([[7]], dtype=torch.int16))
    assert one.sha256 == hashlib.sha256(bytes.fromhex("0000803f000000c0")).hexdigest()
    assert two.sha256 == hashlib.sha256(bytes.fromhex("0700")).hexdigest()
    leaf_a = leaf_hash(f'["a","int16",[1,1],"{two.sha256}"]'.encode())
    leaf_b = leaf_hash(f'["b","float32",[2],"{one.sha256}"]'.encode())
    assert stage_root([one, two]) == node_hash(leaf_a, leaf_b)


@settings(deadline=None, max_examples=50)
@given(st.permutations(range(6)))
def test_the_order_of_tensors_is_irrelevant(order: list[int]) -> None:
    tensors = [tensor_digest(f"t{number}", torch.full((3,), float(number))) for number in range(6)]
    assert stage_root([tensors[number] for number in order]) == stage_root(tensors)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 12 * 32 - 1))
def test_any_bit_changes_it(bit: int) -> None:
    values = torch.arange(12, dtype=torch.int32)
    before = stage_root([tensor_digest("t", values.view(torch.float32))])
    mask = 1 << bit % 32
    values[bit // 32] ^= mask - (1 << 32) if mask >= 1 << 31 else mask
    assert stage_root([tensor_digest("t", values.view(torch.float32))]) != before


def test_name_dtype_and_shape_are_part_of_it() -> None:
    flat = torch.arange(6, dtype=torch.float32)
    found = [
        tensor_digest("t", flat),
        tensor_digest("t", flat.view(2, 3)),
        tensor_digest("t", flat.view(3, 2)),
        tensor_digest("t", flat.view(torch.int32)),
        tensor_digest("u", flat),
    ]
    assert len({each.sha256 for each in found}) == 1
    assert len({each.leaf for each in found}) == 5


def test_where_a_tensor_lies_is_not_part_of_it() -> None:
    square = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert tensor_digest("t", square.t()) == tensor_digest("t", square.t().contiguous())
    assert tensor_digest("t", torch.empty(0, 3)).shape == (0, 3)


def test_no_name_twice() -> None:
    one = tensor_digest("t", torch.zeros(1))
    with pytest.raises(RecordError, match="twice"):
        stage_root([one, one])


def test_it_comes_back_from_json() -> None:
    digest = tensor_digest("t", torch.zeros(2, 3))
    assert TensorDigest.from_json(json.loads(json.dumps(digest.to_json()))) == digest


@pytest.mark.parametrize(
    "change", [{"shape": [-1]}, {"shape": "no"}, {"more": 1}, {"name": 7}, {"shape": None}]
)
def test_other_forms_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(RecordError, match="a statement names"):
        TensorDigest.from_json({**tensor_digest("t", torch.zeros(2)).to_json(), **change})
