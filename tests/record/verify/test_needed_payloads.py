"""What a replay needs is read step by step, whatever a run's length."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from dataclasses import replace

import pytest

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError
from dilocox.record.log.packed import packed_step
from dilocox.record.log.step_statements import Step
from dilocox.record.verify import needed_payloads
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.needed_payloads import Needed, read_needed
from dilocox.record.verify.run_history import RunHistory

PLACES = [f"site{number}/{shard}" for number in range(8) for shard in range(4)]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def step_of(number: int, **changes: object) -> Step:
    key = ExchangeKey.outer(number, 0, 0)
    step = Step(
        key=key, flush=False, attempt=1, tick=number, set=("site0",), owners=("site0",),
        weights=(1.0,), codec="int4", exchange="gather", learning_rate=0.7, momentum=0.9,
        fragments=1, payloads={place: digest(f"{number} {place}") for place in PLACES},
    )  # fmt: skip
    return packed_step(replace(step, **changes))  # type: ignore[arg-type]


def course_of(steps: list[Step]) -> RunHistory:
    manifest = {"config": {"site": {"stages": 1, "shards": 4}}}
    return RunHistory("run", "log", manifest, steps={step.key.text: step for step in steps})


def read(course: RunHistory, get: Needed) -> list[float]:
    shares: list[float] = []
    read_needed(course, {}, lambda state: [], get, shares.append)
    return shares


def test_a_long_run_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed_payloads, "REMEMBERED", 1000)
    course, found = course_of([step_of(number) for number in range(1500)]), Needed(str.encode)
    gc.collect()
    tracemalloc.start()
    try:
        shares = read(course, found)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.count, found.size) == (1500 * len(PLACES), 1500 * len(PLACES) * 64)
    assert shares[-1] == 1
    # The digests alone, as texts, take 5 MB.
    assert peak < 10**6


def test_an_object_that_is_needed_twice_counts_once() -> None:
    same = {place: digest("the same") for place in PLACES}
    found = Needed(str.encode)
    read(course_of([step_of(0, payloads=same), step_of(1, payloads=same), step_of(2)]), found)
    assert found.count == 1 + len(PLACES)


def test_parts_of_payloads_are_read() -> None:
    own = b"".join(bytes.fromhex(digest(f"chunk {number}")) for number in range(3))
    objects = {digest("index"): own} | {digest(f"chunk {n}"): b"chunk" for n in range(3)}
    course = course_of([step_of(0, exchange="reduce", payloads={"site0/0": digest("index")})])
    found = Needed(objects.__getitem__)
    read(course, found)
    assert (found.count, found.size) == (4, len(own) + 3 * 5)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MissingError("in no store"), NotRunError, "in no store; name more stores with --store"),
        (RecordError("has another digest"), RecordError, "has another digest"),
    ],
)
def test_the_first_that_is_not_there_is_named(
    error: Exception, kind: type[Exception], text: str
) -> None:
    def get(name: str) -> bytes:
        if name in (digest("1 site2/1"), digest("3 site0/0")):
            raise error
        return b""

    with pytest.raises(kind, match=f"payload of outer/1/0/0: {text}"):
        read(course_of([step_of(number) for number in range(4)]), Needed(get))
