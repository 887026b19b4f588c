"""States in which rounds begin: which are kept, what is signed, and when."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox.coordinator.protocol.messages import RankId
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Store
from dilocox.record.log.digests import sha256, tensor_bytes
from dilocox.record.log.round_document import Document, steps_from_bytes
from dilocox.record.writer.rank_recorder import SigningIdentity
from dilocox.record.writer.state_recorder import InnerRecord, RecordingPolicy
from tests.record.writer.test_rank_recorder import SIGNER, Notebook, check_returns

RANK = RankId(site="paris", stage=1, shard=0)
LIVE = {"live/w": torch.arange(4.0)}


def capture() -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    return LIVE, {"round": 0}


def inner_record(
    store: Store, every: int = 1, private: bool = False, patience: float = 30.0, keep: int = 0
) -> tuple[InnerRecord, Notebook, list[str]]:
    notebook, warnings = Notebook(), list[str]()
    manner = RecordingPolicy(every, keep, private, {"threads": 1})
    author = SigningIdentity("run", RANK, SIGNER)
    return (
        InnerRecord(author, manner, store, notebook, warnings.append, patience), notebook, warnings,
    )  # fmt: skip


def said(notebook: Notebook) -> list[s.Statement]:
    return [
        s.open_signed(line, SIGNER.public, run="run", kinds=(s.ROUND,)) for line in notebook.heard
    ]


def step(record: InnerRecord, loss: float) -> None:
    record.step(torch.tensor([loss, 1.0], dtype=torch.float64), LIVE.values())


def test_every_second_round(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    record, notebook, warnings = inner_record(store, every=2)
    for round_ in range(5):
        record.boundary(round_, 10 * round_, True, capture)
        step(record, float(round_))
        step(record, 9.0)
    record.boundary(5, 50, False, capture)
    record.wait()
    # Rounds 0, 2 and 4 begin with a state that is kept and end with one that is signed; that of the
    # flush is kept in any case.
    found = [(each.predicate["round"], each.predicate["served"]) for each in said(notebook)]
    assert found == [(0, "yes"), (1, "no"), (2, "yes"), (3, "no"), (4, "yes"), (5, "yes")]
    assert [("steps" in each.subjects) for each in said(notebook)] == [False, True] * 3
    steps = steps_from_bytes(store.get(said(notebook)[3].subjects["steps"]))
    assert [float.fromhex(each.loss) for each in steps] == [2.0, 9.0]
    document = Document.from_bytes(store.get(said(notebook)[2].subjects["document"]))
    assert document.root == said(notebook)[2].subjects["state"]
    assert said(notebook)[2].predicate == {
        "run": "run", "site": "paris", "stage": 1, "shard": 0, "round": 2, "tick": 20,
        "served": "yes",
    }  # fmt: skip
    kept = store.states(2).get(document.tensors[0].sha256)
    assert kept == bytes(tensor_bytes(LIVE["live/w"]))
    assert warnings == []


def test_the_state_is_that_of_the_boundary(tmp_path: Path) -> None:
    """What training makes of the tensors meanwhile does not come into it."""
    store = GatedStore(str(tmp_path))
    record, notebook, _ = inner_record(store)
    tensor = torch.zeros(3)
    record.boundary(0, 0, True, lambda: ({"live/w": tensor}, {}))
    tensor.add_(1.0)
    store.go.set()
    record.wait()
    document = Document.from_bytes(store.get(said(notebook)[0].subjects["document"]))
    assert document.tensors[0].sha256 == sha256(bytes(12))


def test_private_states_are_signed_not_kept(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    record, notebook, _ = inner_record(store, private=True)
    record.boundary(0, 0, True, capture)
    record.wait()
    (found,) = said(notebook)
    assert found.predicate["served"] == "private"
    document = Document.from_bytes(store.get(found.subjects["document"]))
    assert not store.has(document.tensors[0].sha256)
    assert not store.states(0).has(document.tensors[0].sha256)


def test_the_newest_states_are_kept(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    record, notebook, warnings = inner_record(store, every=2, keep=2)
    for round_ in range(7):
        record.boundary(
            round_, round_, True, lambda now=round_: ({"live/w": LIVE["live/w"] + now}, {})
        )
    record.wait()
    there = [round_ for round_ in range(0, 7, 2) if (tmp_path / f"states/{round_:08d}").exists()]
    assert there == [2, 4, 6]  # and the one that somebody may just be reading
    # What was signed can be looked at for ever.
    for each in said(notebook):
        Document.from_bytes(store.get(each.subjects["document"]))
    assert warnings == []


def test_the_flush_removes_no_state_that_is_to_be_kept(tmp_path: Path) -> None:
    """An auditor counts from round to round that keeps one; the flush may be any."""
    store = Store(str(tmp_path))
    record, _, _ = inner_record(store, every=2, keep=1)
    for round_ in range(5):
        record.boundary(round_, 10 * round_, True, capture)
        record.wait()
    before = sorted(path.name for path in (tmp_path / "states").iterdir())
    record.boundary(5, 50, False, capture)
    record.wait()
    after = sorted(path.name for path in (tmp_path / "states").iterdir())
    assert after == [*before, "00000005"]


def test_a_store_that_removes_nothing_is_warned_of_once(tmp_path: Path) -> None:
    store = Append(str(tmp_path))
    record, notebook, warnings = inner_record(store, keep=1)
    for round_ in range(4):
        record.boundary(round_, round_, True, capture)
    record.wait()
    assert len(said(notebook)) == 4
    assert warnings == ["record: s3://x: old states cannot be removed (no); all states are kept"]


class Append(Store):
    """Storage that may be added to."""

    def drop_states(self, before: int) -> list[int]:
        raise RecordError("s3://x: old states cannot be removed (no)")


class GatedStore(Store):
    """Waits for the test, at tensors or at everything; fails if told to."""

    def __init__(self, where: str, tensors: bool = False) -> None:
        super().__init__(where)
        self.go, self.failure, self.tensors = threading.Event(), False, tensors

    def states(self, round_: int) -> GatedStore:
        below = GatedStore(super().states(round_).where, self.tensors)
        below.go, below.failure = self.go, self.failure
        return below

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        if digest is not None or not self.tensors:
            assert self.go.wait(30.0)
        if self.failure:
            raise RecordError("s3://x: cannot be written (no such bucket)")
        return super().put(data, digest)


def test_it_is_signed_before_it_is_kept(tmp_path: Path) -> None:
    """Votes wait for the signature, not for the store."""
    store = GatedStore(str(tmp_path), tensors=True)
    record, notebook, _ = inner_record(store)
    record.boundary(0, 0, True, capture)
    record.wait_signed()
    assert len(said(notebook)) == 1
    digest = sha256(tensor_bytes(LIVE["live/w"]))
    assert not store.states(0).has(digest)
    store.go.set()
    record.wait()
    assert store.states(0).has(digest)


@pytest.mark.parametrize("failure", [True, False])
def test_a_store_that_fails_or_is_too_slow_ends_nothing(tmp_path: Path, failure: bool) -> None:
    store = GatedStore(str(tmp_path))
    store.failure = failure
    record, notebook, warnings = inner_record(store, patience=60.0 if failure else 0.05)
    if failure:
        store.go.set()
    for round_ in range(3):
        record.boundary(round_, round_, True, capture)
        record.wait() if not failure else record.wait_signed()
    assert len(warnings) == 1
    expected = "no such bucket" if failure else "has not kept a state for 0 s"
    assert expected in warnings[0]
    assert warnings[0].endswith("the run goes on, audits of its rounds will fail")
    store.go.set()
    assert record._keeping is not None
    record._keeping.result(30.0)
    assert len(notebook.heard) == (0 if failure else 1)


def test_a_store_that_stops_answering_holds_no_vote_up(tmp_path: Path) -> None:
    """Every contribution waits for the signature, which waits for the store: for a while."""
    store = GatedStore(str(tmp_path))
    record, _, warnings = inner_record(store, patience=0.05)
    record.boundary(0, 0, True, capture)
    check_returns(record.wait_signed)
    assert len(warnings) == 1
    assert "has not kept a state for 0 s" in warnings[0]
    record.wait_signed()
    store.go.set()
