"""A rank's part in the record: signatures, payloads that are kept beside the exchanges."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilocox.compression import Geometry, compressor
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import RankId
from dilocox.errors import RecordError
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Store
from dilocox.record.log.digests import sealed, sha256, stage_root, tensor_bytes, tensor_digest
from dilocox.record.log.state_statements import State
from dilocox.record.writer import rank_recorder
from dilocox.record.writer.rank_recorder import WAITING, RankRecord, SigningIdentity, listing_of
from dilocox.utils.storage import Room
from tests.support.thread_sites import until

SIGNER = s.Signer.from_hex("07" * 32)
RANK = RankId(site="paris", stage=1, shard=0)
KEY = ExchangeKey.outer(3, 1, 0)


class Notebook:
    """A coordinator that only listens."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def record_state(self, statement: str) -> None:
        self.heard.append(statement)


class SlowStore(Store):
    """Waits for the test before it keeps anything; then fails, if told to."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.go = threading.Event()
        self.failure: Exception | None = None

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        assert self.go.wait(30.0)
        if self.failure is not None:
            raise self.failure
        return super().put(data, digest)


def outcome(*payloads: bytes) -> Outcome:
    tensors = tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in payloads)
    return Outcome(None, ("paris",), None, None, 0, 0.0, 1, payloads=tensors)


def contribution(key: ExchangeKey) -> Contribution:
    codec = compressor("int4", Geometry(((128,),), (0,), 128))
    return Contribution(key, 128, None, codec, "gather", {"paris": 1.0})


def rank_record(store: Store, patience: float = 60.0) -> tuple[RankRecord, Notebook, list[str]]:
    notebook, warnings = Notebook(), list[str]()
    author = SigningIdentity("run", RANK, SIGNER)
    return RankRecord(author, store, notebook, warnings.append, patience), notebook, warnings


def check_returns(wait: Callable[[], None]) -> None:
    """It does not wait for what never comes."""
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(20.0)
    assert not waiting.is_alive()


def exchanged(record: RankRecord, key: ExchangeKey, *payloads: bytes) -> None:
    future: Future[Outcome] = Future()
    landing = record.watching(lambda given: future)(contribution(key))
    future.set_result(outcome(*payloads))
    assert landing.result(0.0).contributors == ("paris",)


def test_payloads_of_outer_steps_are_kept(tmp_path: Path) -> None:
    record, _, warnings = rank_record(Store(str(tmp_path)))
    exchanged(record, KEY, b"ours", b"theirs")
    exchanged(record, ExchangeKey.gradient(0, 0, 1), b"a gradient")
    record.wait()
    assert Store(str(tmp_path)).get(sha256(b"ours")) == b"ours"
    assert Store(str(tmp_path)).get(sha256(b"theirs")) == b"theirs"
    assert not Store(str(tmp_path)).has(sha256(b"a gradient"))
    assert warnings == []


def test_payloads_are_free_once_they_are_stored(tmp_path: Path) -> None:
    record, _, _ = rank_record(Store(str(tmp_path)))
    freed = threading.Event()
    known = outcome(b"payload")
    weakref.finalize(known.payloads[0], freed.set)

    def submit(given: Contribution, known: Outcome = known) -> Future[Outcome]:
        done: Future[Outcome] = Future()
        done.set_result(known)
        return done

    # The exchange waits for its landing meanwhile.
    landing = record.watching(submit)(contribution(KEY))
    del known, submit
    assert freed.wait(20.0)
    assert landing.result(0.0).contributors == ("paris",)
    record.close()


def test_a_closed_record_keeps_what_it_has_and_its_thread_ends(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    record, _, _ = rank_record(Store(str(tmp_path)))
    (thread,) = set(threading.enumerate()) - before
    exchanged(record, KEY, b"ours")
    record.close()
    thread.join(20.0)
    assert not thread.is_alive()
    assert Store(str(tmp_path)).get(sha256(b"ours")) == b"ours"


def test_an_exchange_that_failed_leaves_nothing(tmp_path: Path) -> None:
    record, _, warnings = rank_record(Store(str(tmp_path)))
    future: Future[Outcome] = Future()
    landing = record.watching(lambda given: future)(contribution(KEY))
    future.set_exception(RuntimeError("broken"))
    assert str(landing.exception(0.0)) == "broken"
    record.wait()
    assert list(tmp_path.rglob("*")) == []
    assert warnings == []


def test_exchanges_wait_for_a_slow_store_only_when_the_queue_is_full(tmp_path: Path) -> None:
    store = SlowStore(str(tmp_path))
    record, _, _ = rank_record(store)
    # One is with the store, WAITING wait.
    for number in range(1 + WAITING):
        exchanged(record, KEY, b"payload %d" % number)
    beyond = threading.Thread(target=exchanged, args=(record, KEY, b"one more"))
    beyond.start()
    beyond.join(0.2)
    assert beyond.is_alive()
    store.go.set()
    beyond.join(30.0)
    assert not beyond.is_alive()
    record.wait()
    assert store.has(sha256(b"one more"))
    assert store.has(sha256(b"payload 0"))


def test_what_an_exchange_must_have_kept_is_waited_for(tmp_path: Path) -> None:
    store = SlowStore(str(tmp_path))
    record, _, warnings = rank_record(store)
    kept = record.keep([torch.frombuffer(bytearray(b"own"), dtype=torch.uint8)])
    waiting = threading.Thread(target=kept)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    store.go.set()
    waiting.join(30.0)
    assert store.has(sha256(b"own"))
    assert warnings == []


def test_nobody_waits_for_long_for_what_is_not_kept(tmp_path: Path) -> None:
    store = SlowStore(str(tmp_path))
    record, _, warnings = rank_record(store, patience=0.05)
    kept = record.keep([torch.frombuffer(bytearray(b"own"), dtype=torch.uint8)])
    kept()
    assert len(warnings) == 1
    assert "has kept nothing for 0 s; the run goes on" in warnings[0]
    kept()
    store.go.set()
    record.wait()


def test_a_store_that_stays_slow_is_given_up(tmp_path: Path) -> None:
    store = SlowStore(str(tmp_path))
    record, _, warnings = rank_record(store, patience=0.05)
    for number in range(2 + WAITING):
        exchanged(record, KEY, b"payload %d" % number)
    assert len(warnings) == 1
    assert "has kept nothing for 0 s; the run goes on, but cannot be verified" in warnings[0]
    exchanged(record, KEY, b"nobody waits any more")
    store.go.set()
    record.wait()
    assert not store.has(sha256(b"nobody waits any more"))


def test_a_store_that_stops_answering_does_not_keep_a_run_from_ending(tmp_path: Path) -> None:
    store = SlowStore(str(tmp_path))
    record, _, warnings = rank_record(store, patience=0.05)
    exchanged(record, KEY, b"payload")
    check_returns(record.wait)
    assert len(warnings) == 1
    assert "has kept nothing for 0 s" in warnings[0]
    store.go.set()


def test_a_store_that_keeps_something_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together take longer than the patience, each by itself does not."""
    turn = threading.Semaphore(0)

    class Steady(Store):
        def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
            assert turn.acquire(timeout=30.0)
            return super().put(data, digest)

    record, _, warnings = rank_record(Steady(str(tmp_path)), patience=60.0)
    patiences: list[float] = []

    class Over(threading.Event):
        """Each wait for it is as long as it takes to keep one payload."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            patiences.append(timeout)
            kept = record._kept
            turn.release()
            assert until(lambda: record._kept > kept or self.is_set())
            return self.is_set()

    payloads = [b"payload %d" % number for number in range(WAITING)]
    for payload in payloads:
        exchanged(record, KEY, payload)
    waiting = rank_recorder._Waiting
    monkeypatch.setattr(rank_recorder, "_Waiting", lambda: waiting(over=Over()))
    record.wait()
    assert len(patiences) >= WAITING
    assert set(patiences) == {60.0}
    assert warnings == []
    assert all(Store(str(tmp_path)).has(sha256(payload)) for payload in payloads)


def test_a_store_that_fails_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    store = SlowStore(str(tmp_path))
    store.failure = RecordError("s3://x: cannot be written (no such bucket)")
    store.go.set()
    record, _, warnings = rank_record(store)
    for number in range(3 * WAITING):
        exchanged(record, KEY, b"payload %d" % number)
    record.wait()
    assert warnings == [
        "record: s3://x: cannot be written (no such bucket); the run goes on, but cannot be "
        "verified in full"
    ]


def test_what_is_signed_is_what_the_coordinator_expects() -> None:
    record, _, _ = rank_record(Store("memory://recording"))
    text = record.sign(KEY, 2, "ab" * 32)
    said = s.open_signed(text, SIGNER.public, run="run", kinds=(s.CONTRIBUTION,))
    assert said.subjects == {"payload": "ab" * 32}
    assert said.predicate == {
        "run": "run", "site": "paris", "shard": 0, "round": 3, "exchange_key": "outer/3/1/0",
        "attempt": 2,
    }  # fmt: skip


@pytest.mark.parametrize("payload", [None, b"\xab" * 32])
def test_a_commitment_names_values_and_payload_for_its_maker_alone(payload: bytes | None) -> None:
    record, _, _ = rank_record(Store("memory://committing"))
    values = torch.arange(128.0)
    given = replace(contribution(KEY), values=values)
    text = record.commit(given, payload)
    said = s.open_signed(text, SIGNER.public, run="run", kinds=(s.COMMITMENT,))
    where = ("run", "outer/3/1/0", "paris", 0)
    expected = {"values": sealed(sha256(tensor_bytes(values)), *where)}
    if payload is not None:
        expected["payload"] = sealed("ab" * 32, *where)
    assert said.subjects == expected
    assert said.predicate == {
        "run": "run", "site": "paris", "shard": 0, "round": 3, "exchange_key": "outer/3/1/0",
    }  # fmt: skip


def test_a_sealed_digest_is_its_maker_s_alone() -> None:
    all_ = {
        sealed("ab" * 32, run, key, site, shard)
        for run in ("r", "s") for key in ("outer/3/1/0", "outer/3/1/1")
        for site in ("paris", "lyon") for shard in (0, 1)
    }  # fmt: skip
    assert len(all_) == 16
    text = b'dilocox/commitment/v1\0["r","outer/3/1/0","lyon",1,"%s"]' % (b"ab" * 32)
    assert hashlib.sha256(text).hexdigest() in all_


@pytest.mark.parametrize("kind", ["initial", "final"])
def test_states(tmp_path: Path, kind: str) -> None:
    record, notebook, _ = rank_record(Store(str(tmp_path)))
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, 2)}
    record.state(kind, 5, tensors, {"config.json": "ab" * 32})
    (line,) = notebook.heard
    said = s.open_signed(line, SIGNER.public, run="run", kinds=(s.CHECKPOINT,))
    digests = [tensor_digest(name, tensor) for name, tensor in tensors.items()]
    assert said.subjects["state"] == stage_root(digests).hex()
    assert (said.predicate["kind"], said.predicate["round"]) == (kind, 5)
    assert said.predicate["files"] == {"config.json": "ab" * 32}
    store = Store(str(tmp_path))
    listed = json.loads(store.get(said.subjects["tensors"]))
    assert [each["name"] for each in listed] == ["b", "a"], "in model order"
    # theta_0 is kept, the final state has its files.
    assert [store.has(each["sha256"]) for each in listed] == [kind == "initial"] * 2


def test_theta_0_that_began_as_bf16_takes_half_the_bytes(tmp_path: Path) -> None:
    """Signed and read as fp32, subnormal values and the signs of zero and infinity too."""
    bits = torch.tensor([0, -(2**31), 0x00010000, 0x7F7F0000, 0x3F800000, -0x40800000])
    odd = bits.to(torch.int32).view(torch.float32)
    drawn = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    tensors = {"b": drawn.to(torch.bfloat16).float(), "a": odd, "none": torch.empty(0, 3)}
    record, notebook, _ = rank_record(Store(str(tmp_path)))
    record.state("initial", 0, tensors)
    said = s.open_signed(notebook.heard[0], SIGNER.public, run="run", kinds=(s.CHECKPOINT,))
    digests = [tensor_digest(name, tensor) for name, tensor in tensors.items()]
    assert said.subjects["state"] == stage_root(digests).hex()
    store = Store(str(tmp_path))
    for digest, tensor in zip(digests, tensors.values(), strict=True):
        assert digest.dtype == "float32"
        assert store.has(digest.sha256)
        assert store.get(digest.sha256) == bytes(tensor_bytes(tensor))
        assert not Path(store.path(digest.sha256)).exists()
        halved = Path(store.path(digest.sha256) + ".bf16")
        assert halved.stat().st_size == 2 * tensor.numel()
    halved = Path(store.path(digests[0].sha256) + ".bf16")
    data = bytearray(halved.read_bytes())
    for changed in (bytes(data[:-1]), bytes([data[0] ^ 1, *data[1:]])):
        halved.write_bytes(changed)
        with pytest.raises(RecordError, match="holds other bytes than its name says"):
            store.get(digests[0].sha256)


def test_one_tensor_with_more_bits_keeps_all_as_they_are(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    record, _, _ = rank_record(store)
    tensors = {"norm": torch.ones(5), "weight": torch.tensor([1.0, 1.0 + 2**-20])}
    record.state("initial", 0, tensors)
    assert all(
        Path(store.path(tensor_digest(name, tensor).sha256)).exists()
        for name, tensor in tensors.items()
    )
    assert not list(tmp_path.rglob("*.bf16"))


def test_what_was_published_in_bf16_is_signed_too(tmp_path: Path) -> None:
    record, notebook, _ = rank_record(Store(str(tmp_path)))
    tensors = {"b": torch.full((3,), 1.0 + 2**-20), "a": torch.zeros(2, 2)}
    record.state("final", 5, tensors, {}, lambda tensor: tensor.to(torch.bfloat16))
    said = s.open_signed(notebook.heard[0], SIGNER.public, run="run", kinds=(s.CHECKPOINT,))
    state = State.of(said, 0)
    rounded = [tensor_digest(name, tensor.to(torch.bfloat16)) for name, tensor in tensors.items()]
    assert state.published is not None
    assert state.published[0] == stage_root(rounded).hex()
    assert Store(str(tmp_path)).get(state.published[1]) == listing_of(rounded)
    assert state.root == stage_root([tensor_digest(n, t) for n, t in tensors.items()]).hex()


class FullStore(Store):
    """Its disk is full until the test frees it."""

    def __init__(self, where: str) -> None:
        super().__init__(where, room=Room(pause=0.001))
        self.free, self.tries = threading.Event(), 0

    def _write(self, path: str, data: bytes | memoryview, compared: bool) -> None:
        self.tries += 1
        if not self.free.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(path, data, compared)


def test_a_full_store_is_waited_for_longer_than_a_slow_one(tmp_path: Path) -> None:
    """Nothing is given up that a little room would save."""
    store = FullStore(str(tmp_path))
    record, _, warnings = rank_record(store, patience=0.01)
    wait = record.keep(outcome(b"payload").payloads)
    waiter = threading.Thread(target=wait)
    waiter.start()
    while store.tries < 20:
        waiter.join(0.01)
    assert waiter.is_alive()
    store.free.set()
    waiter.join(30.0)
    assert not waiter.is_alive()
    record.wait()
    assert warnings == []
    assert store.get(sha256(b"payload")) == b"payload"


def test_a_full_store_keeps_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path), room=Room(seconds=0.0, pause=0.0))

    def failing(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dilocox.record.log.blob_store.os.fsync", failing)
    with pytest.raises(RecordError, match="No space left"):
        store.put(b"payload")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
