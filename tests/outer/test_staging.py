"""Copies between a device and host memory: what waits for what, and which bytes arrive."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from dilocox.compression import compressor, frame_bytes
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.outer import staging
from dilocox.outer.contribution import Contribution
from dilocox.outer.fragment_state import FragmentState, tensors_digest
from dilocox.outer.layout import Layout
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.outer.staging import HOST, sha256_of, snapshot, staging_of
from dilocox.record.log.blob_store import Store
from dilocox.record.log.round_document import Document
from dilocox.training import checkpoint_io
from dilocox.transport.exchange_worker import ExchangeWorker
from tests.outer.test_loop import plan
from tests.record.writer.test_rank_recorder import rank_record
from tests.record.writer.test_state_recorder import inner_record, said
from tests.support.exchanging import GEOMETRY, LENGTH, SharedBallot
from tests.support.streams import CPU, FakeDriver, play_device
from tests.support.thread_sites import MemoryStore

pytestmark = pytest.mark.waits

TENSORS = {
    "w": torch.randn(37, 11, generator=torch.Generator().manual_seed(1)),
    "turned": torch.randn(9, 5, generator=torch.Generator().manual_seed(2)).T,
    "half": torch.randn(301, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "step": torch.tensor(7.0),
    "bytes": torch.arange(70, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return play_device(monkeypatch)


def plain(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def test_a_cpu_has_nothing_to_wait_for() -> None:
    given = torch.ones(5)
    assert staging_of(CPU) is HOST
    assert HOST.to_device(given) is given
    assert HOST.mark() is None
    assert [bytes(block) for block in HOST.read(given)] == [plain(given)]


def test_bytes_are_read_through_two_blocks(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BLOCK", 64)
    for tensor in TENSORS.values():
        driver.pinned.clear()
        driver.copied.clear()
        blocks = [bytes(block) for block in staging_of(CPU).read(tensor)]
        assert b"".join(blocks) == plain(tensor)
        assert driver.pinned == [min(64, tensor.nbytes)] * 2
        assert driver.copied == [len(block) for block in blocks]
        assert all(len(block) == 64 for block in blocks[:-1])


def test_the_next_block_is_under_way_while_one_is_used(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BLOCK", 64)
    reading = staging_of(CPU).read(torch.arange(50.0))
    next(reading)
    assert driver.copied == [64, 64]
    assert len(driver.here.waiting) == 1


def test_digests_are_those_of_the_bytes(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(staging._KNOWN, CPU, HOST)
        expected = tensors_digest(TENSORS)
    monkeypatch.setattr(staging, "BLOCK", 64)
    assert tensors_digest(TENSORS) == expected
    for tensor in TENSORS.values():
        assert sha256_of(tensor) == hashlib.sha256(plain(tensor)).hexdigest()


def test_a_snapshot_is_of_the_moment_it_was_asked_for(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SHARED", 1024)
    now = {name: tensor.clone() for name, tensor in TENSORS.items()}
    found = snapshot(now)
    # 1628 + 180 + 602 + 4 + 70 + 0, each on from a multiple of 64.
    assert driver.pinned == [1664, 192 + 640 + 64 + 128]
    assert len(driver.here.waiting) == 0, "training's stream copies nothing"
    assert driver.waits == [("stream 0", "training")]
    staging_of(CPU).before_change()
    assert ("training", "stream 0") in driver.waits
    for tensor in now.values():
        tensor.zero_()
    copies = found.tensors()
    assert list(copies) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert copies[name].dtype == tensor.dtype
        assert torch.equal(copies[name], tensor)


def test_who_does_not_wait_would_spoil_a_snapshot(driver: FakeDriver) -> None:
    """What the test before shows, it could fail to show."""
    tensor = torch.ones(3)
    found = snapshot({"w": tensor})
    tensor.zero_()
    assert not found.tensors()["w"].any()


def test_a_checkpoint_holds_the_boundary(driver: FakeDriver, tmp_path: Path) -> None:
    writer = checkpoint_io.RankCheckpointer(
        str(tmp_path), "paris", 0, 0, 2, take=lambda tensors: snapshot(tensors).tensors
    )
    written: dict[int, str] = {}
    tensor = torch.arange(5.0)
    writer.save(10, {"w": tensor}, {}, written.__setitem__, lambda *why: pytest.fail(str(why)))
    staging_of(CPU).before_change()
    tensor.zero_()
    writer.wait()
    loaded = checkpoint_io.load(str(tmp_path), 10, "paris", 0, 0, written[10])
    assert torch.equal(loaded.tensors["w"], torch.arange(5.0))


def test_a_signed_state_is_that_of_the_boundary(driver: FakeDriver, tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    record, notebook, _ = inner_record(store)
    tensor = torch.zeros(3)
    record.boundary(0, 0, True, lambda: ({"live/w": tensor}, {}))
    assert driver.copied == [12]
    staging_of(CPU).before_change()
    tensor.add_(1.0)
    record.wait()
    document = Document.from_bytes(store.get(said(notebook)[0].subjects["document"]))
    assert document.tensors[0].sha256 == hashlib.sha256(bytes(12)).hexdigest()


def test_a_commitment_is_to_the_same_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record, _, _ = rank_record(Store(str(tmp_path)))
    key = ExchangeKey.outer(3, 1, 0)
    values = torch.randn(LENGTH, generator=torch.Generator().manual_seed(5))
    what = Contribution(key, LENGTH, values, compressor("int4", GEOMETRY), "gather", {"paris": 1.0})
    expected = record.commit(what, b"x" * 32)
    driver = play_device(monkeypatch)
    monkeypatch.setattr(staging, "BLOCK", 256)
    assert record.commit(what, b"x" * 32) == expected
    assert max(driver.pinned) == 256, "no copy of the whole contribution"


def test_tensors_are_packed_with_one_wait(driver: FakeDriver) -> None:
    live = {"a": torch.randn(5, 3), "b": torch.randn(130)}
    layout = Layout.of({name: tensor.shape for name, tensor in live.items()})
    flat = layout.pack(live)
    assert driver.pinned == [4 * layout.length]
    assert driver.copied == [60, 520]
    assert driver.uploaded == []
    for name, view in layout.views(flat).items():
        assert torch.equal(view, live[name])
    assert all(not flat[gap].any() for gap in layout.gaps)
    target = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    layout.unpack(flat, target)
    assert all(torch.equal(target[name], live[name]) for name in live)


def alone(codec: str) -> tuple[OuterLoop, dict[str, torch.Tensor], ExchangeWorker]:
    live = {"a": torch.zeros(96, 64)}
    ballot = SharedBallot(MemoryStore({}), "paris", members=["paris"])
    worker = ExchangeWorker(ballot, "paris")
    states = [FragmentState(Layout.of({"a": (96, 64)}), live, error_feedback=True)]
    loop = OuterLoop(
        states, live, LoopPlace("paris"), worker.submit, lambda: None, hash_beside=True
    )  # fmt: skip
    return loop, live, worker


def rounds_of(codec: str) -> str:
    """The digest after three rounds of a site alone."""
    loop, live, worker = alone(codec)
    draw = torch.Generator().manual_seed(1)
    digest = ""
    for number in range(3):
        live["a"] -= torch.randn(96, 64, generator=draw)
        member = plan().members["paris"]
        now = plan(number, fragments=1, slots=1, delay=0, codec=codec, members={"paris": member})
        loop.end_of_slot(now, 1)
        digest = loop.states[0].digest()
    worker.close()
    return digest


@pytest.mark.parametrize("codec", ["int4", "topk:64", "lowrank:4"])
def test_exchange_and_training_wait_for_each_other(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rounds_of(codec)
    driver = play_device(monkeypatch)
    assert rounds_of(codec) == expected
    waits = driver.waits
    beside = {name for name, other in waits if other == "training"}
    assert beside
    assert "training" not in beside
    # Every exchange waits for what it was given, and training for what came of it.
    exchanging = {other for name, other in waits if name == "training"}
    assert exchanging
    assert exchanging <= beside
    # A digest has a stream of its own.
    assert len(beside - exchanging) == 1
    # u, and what others saw of it and the mean, belong to two streams for a while.
    size = 4 * 96 * 64
    assert [size] * 3 == [bytes_ for name, bytes_ in driver.held if name in exchanging][
        :: 1 + (codec == "lowrank:4")
    ]
    assert [size] * 6 == [bytes_ for name, bytes_ in driver.held if name == "training"]


def test_only_payloads_cross_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = play_device(monkeypatch)
    loop, live, worker = alone("topk:64")
    live["a"] -= torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    driver.pinned.clear()
    driver.copied.clear()
    now = plan(fragments=1, slots=1, delay=0, codec="topk:64",
               members={"paris": plan().members["paris"]})  # fmt: skip
    loop.land_before(now, 1)
    driver.copied.clear()
    loop._begin(now, 0, 1)
    outcome = loop.pending[0].outcome.result(60.0)
    worker.close()
    part = compressor("topk:64", loop.states[0].layout.geometry).part(0, 96 * 64)
    assert driver.pinned[-1] == frame_bytes(part)
    assert driver.uploaded == [part.payload_bytes]
    assert outcome.payloads[0].nbytes == part.payload_bytes
