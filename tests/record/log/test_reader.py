"""Workers open the lines of a long log; what becomes of them is what becomes of them here."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator

import pytest

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.errors import RecordError
from dilocox.record.log import reader
from dilocox.record.log import statements as s
from dilocox.record.log.reader import Line, read_lines
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.verify.run_history import RunHistory, read_history
from tests.support.record_scene import SIGNERS, Scene

WORKERS = 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH", 7)
    monkeypatch.setattr(reader, "FEW", 10)


@pytest.fixture(scope="module")
def one_pool() -> Iterator[reader._Pool]:
    pool = reader._Pool(WORKERS)
    close = pool.close
    pool.close = lambda: None  # type: ignore[method-assign]
    yield pool
    close()


@pytest.fixture
def shared(one_pool: reader._Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readers have the same workers: each takes a second to start."""
    monkeypatch.setattr(reader, "_Pool", lambda workers: one_pool)


@pytest.fixture
def log(scene: Scene) -> list[str]:
    """What three sites and their coordinator have signed in two exchanges, and an unknown type."""
    scene.exchange()
    scene.exchange(ExchangeKey.outer(0, 0, 1))
    scene.notary._say("https://example.org/other", {"nested": [{}, None, "é", 1.5, -1]}, {})
    return scene.entries()


def spoiled(rng: random.Random, line: str) -> str:
    """A line with a few characters changed, a part lost, or signed by somebody else."""
    how = rng.randrange(6)
    if how == 0:
        return line[: rng.randrange(len(line))]
    if how == 1:
        return SIGNERS[rng.choice("abc")].sign(s.opened(line)[0])
    if how == 2:
        found = json.loads(line)
        found["signatures"][0]["keyid"] = SIGNERS[rng.choice("abc")].public
        return json.dumps(found, sort_keys=True, separators=(",", ":"))
    characters = list(line)
    for _ in range(rng.randrange(1, 3)):
        characters[rng.randrange(len(line))] = rng.choice('A/=0g"\\{}[],\x00é\ud800\n')
    return "".join(characters)


@pytest.mark.usefixtures("shared")
def test_lines_are_opened_alike(log: list[str]) -> None:
    rng = random.Random(5)
    lines = [each if rng.random() < 0.3 else spoiled(rng, each) for each in log for _ in range(12)]
    lines += ["", "[" * 100_000, f'{{"payload":{"[" * 5000}']
    here = list(read_lines(lines, 0))
    assert list(read_lines(lines, WORKERS)) == here
    assert [each.text for each in here] == lines
    assert {bool(each.signer) for each in here if each.statement is not None} == {True, False}
    assert any(each.statement is None for each in here)


def course(entries: list[str], key: NoteKey) -> RunHistory | str:
    try:
        return read_history(entries, key)
    except RecordError as error:
        return str(error)


@pytest.mark.usefixtures("shared")
def test_verdicts_are_alike(scene: Scene, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rng, key = random.Random(7), scene.notary.writer.public
    logs = [log, log[:3], log[::-1], [*log, log[0]]]
    for _ in range(4):
        place = rng.randrange(len(log))
        logs.append([*log[:place], spoiled(rng, log[place]), *log[place + 1 :]])
    # Of two bad ones the first is named, whatever is bad about it.
    other = SIGNERS["a"].sign(s.opened(log[11])[0])
    logs += [[*log[:11], other, *log[12:-1], "no statement"], [*log[:9], "", *log[10:11], other]]
    found = {}
    for cores in (0, WORKERS):
        monkeypatch.setattr(reader, "_cores", lambda cores=cores: cores)
        found[cores] = [course(each, key) for each in logs]
    assert found[0] == found[WORKERS]
    assert isinstance(found[0][0], RunHistory)
    assert found[0][0].unknown_types == {"https://example.org/other"}
    assert str(found[0][-2]).startswith("statement 11: the signature is not one of key")
    assert str(found[0][-1]).startswith("statement 9: not a signed statement")


def failing(lines: list[str]) -> Iterator[str]:
    yield from lines
    raise RecordError("changed while it was read")


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("workers", [0, WORKERS])
def test_an_error_of_the_source_comes_after_the_lines_before_it(
    log: list[str], workers: int
) -> None:
    lines = read_lines(failing(log * 2), workers)
    assert [next(lines).text for _ in log * 2] == log * 2
    with pytest.raises(RecordError, match="changed while"):
        next(lines)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[reader._Pool]:
    """The pools that are made."""
    made: list[reader._Pool] = []

    class Noted(reader._Pool):
        def __init__(self, workers: int) -> None:
            super().__init__(workers)
            made.append(self)

    monkeypatch.setattr(reader, "_Pool", Noted)
    return made


def test_workers_end_with_whoever_reads(log: list[str], pools: list[reader._Pool]) -> None:
    lines = read_lines(log * 3, 1)
    assert next(lines).text == log[0]
    lines.close()
    assert len(list(read_lines(log[:9], 1))) == 9
    (pool,) = pools  # a few lines need no worker
    assert pool.processes
    assert all(process.returncode == 0 for process in pool.processes)


def test_lines_are_opened_where_no_worker_can_be_started(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(read_lines(log, 0))
    monkeypatch.setattr(sys, "executable", "/not/there")
    assert list(read_lines(log, 1)) == expected


def test_a_worker_that_dies_is_made_up_for(log: list[str], pools: list[reader._Pool]) -> None:
    found: list[Line] = []
    for line in read_lines(log * 4, 1):
        if not found:
            pools[0].processes[0].kill()
        found.append(line)
    assert found == list(read_lines(log * 4, 0))
    assert pools[0].processes[0].returncode not in (0, None)
