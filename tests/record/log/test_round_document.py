"""Documents of states and fingerprints of steps: what is said of a round that can be repeated."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.log.digests import stage_root, tensor_digest
from dilocox.record.log.round_document import (
    Document,
    Fingerprint,
    checksum,
    fingerprint,
    steps_from_bytes,
    steps_to_bytes,
)

FACTS = {"machine": "x86_64", "threads": 1, "layout": {"stages": 2}}
TENSORS = {"live/b": torch.ones(3), "inner/step": torch.tensor(4.0), "random/cpu": torch.ones(
    5, dtype=torch.uint8)}  # fmt: skip


def test_a_document_and_back() -> None:
    document = Document.of(TENSORS, {"round": 3, "pending": [{"keep": 0.7}]}, FACTS, ["loss"])
    again = Document.from_bytes(document.to_bytes())
    assert again == document
    assert [each.name for each in again.tensors] == sorted(TENSORS)
    assert again.root == stage_root([tensor_digest(n, t) for n, t in TENSORS.items()]).hex()


@pytest.mark.parametrize(
    "change",
    [
        lambda t, s: t.update({"live/b": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}),
        lambda t, s: t.update({"live/b": torch.ones(1, 3)}),
        lambda t, s: t.pop("random/cpu"),
        lambda t, s: s.update(round=4),
    ],
)
def test_whatever_changes_is_another_document(change: Any) -> None:
    tensors, state = dict(TENSORS), {"round": 3}
    before = Document.of(tensors, state, FACTS, []).to_bytes()
    change(tensors, state)
    assert Document.of(tensors, state, FACTS, []).to_bytes() != before


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"\xff", b'{"format":2}', b'{"format":1,"state":{}}',
     b'{"format":1,"state":{},"tensors":[{}],"class":{},"replaced":[]}'],
)  # fmt: skip
def test_what_is_no_document(data: bytes) -> None:
    with pytest.raises(RecordError):
        Document.from_bytes(data)


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=20), max_size=4))
def test_the_checksum_is_the_sum_of_all_bits(values: list[list[float]]) -> None:
    tensors = [torch.tensor(each, dtype=torch.float32) for each in values]
    words = [struct.unpack("<i", struct.pack("<f", x))[0] for each in values for x in each]
    assert int(checksum(tensors)) == sum(words)
    assert int(checksum(reversed(tensors))) == sum(words)


def test_the_checksum_sees_the_last_bit() -> None:
    tensor = torch.full((1000,), 0.1)
    before = int(checksum([tensor]))
    tensor[500] = torch.nextafter(tensor[500], torch.tensor(1.0))
    assert int(checksum([tensor])) == before + 1


numbers = st.floats(allow_nan=False)


@given(st.lists(st.tuples(numbers, numbers, st.integers(-(2**63), 2**63 - 1))))
def test_fingerprints_and_back(rows: list[tuple[float, float, int]]) -> None:
    steps = [
        fingerprint(torch.tensor([loss, norm], dtype=torch.float64), torch.tensor(total))
        for loss, norm, total in rows
    ]
    assert steps == [Fingerprint(loss.hex(), norm.hex(), total) for loss, norm, total in rows]
    assert steps_from_bytes(steps_to_bytes(steps)) == steps


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b'{"format":2,"steps":[]}', b'{"format":1,"steps":[["0x1p0"]]}',
     b'{"format":1,"steps":[["one","0x1p0","3"]]}',
     b'{"format":1,"steps":[["0x1p0","0x1p0","x"]]}'],
)  # fmt: skip
def test_what_is_no_list_of_fingerprints(data: bytes) -> None:
    with pytest.raises(RecordError):
        steps_from_bytes(data)
