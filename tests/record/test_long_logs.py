"""Who reads a long log holds what its rounds need, and not its statements."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from dilocox.errors import RecordError
from dilocox.record.log import reader
from dilocox.record.log import statements as s
from dilocox.record.verify.metric_reports import FILE, _lines
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.report.folder import read_run
from tests.support.record_scene import Scene

STATEMENTS = 4000
SIZE = 4000
"""Bytes of a statement."""
MOST = STATEMENTS * SIZE // 8
"""Bytes that may be held: far less than all of them."""


@pytest.fixture
def long(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A log of statements whose type nobody knows, so that no signature takes any time."""
    monkeypatch.setattr(reader, "BYTES", 20 * SIZE)
    monkeypatch.setattr(reader, "_cores", lambda: 1)
    scene.exchange()
    run = scene.config.folder
    (run / "run.toml").write_text(scene.config.to_toml(), encoding="utf-8")
    said = {"run": scene.notary.run, "text": "x" * (SIZE * 3 // 4)}
    entry = scene.notary.signer.sign(s.Statement("https://example.org/long", {}, said))
    for _ in range(STATEMENTS):
        scene.notary.log.append(entry)
    scene.notary.writer.cover()
    assert (run / "record/statements.jsonl").stat().st_size > STATEMENTS * SIZE
    return scene


def peak(what: Callable[[], object]) -> int:
    """Most bytes that were held at once while something was done."""
    gc.collect()
    tracemalloc.start()
    try:
        what()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_audited_run(long: Scene) -> None:
    run: list[AuditedRun] = []
    assert peak(lambda: run.append(AuditedRun(long.config.folder, (), None))) < MOST
    assert peak(lambda: run[0].refresh()) < MOST
    assert run[0].course.unknown == STATEMENTS
    size = run[0].seen().size
    long.notary.log.append(long.entries()[-1])
    assert not run[0].refresh(), "no checkpoint covers it"
    long.notary.writer.cover()
    assert run[0].refresh()
    assert run[0].seen().size == size + 1 == len(run[0].entries)
    path = long.config.folder / "record/statements.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[-1], *lines[1:]]))
    with pytest.raises(RecordError, match="not the signed one"):
        run[0].refresh()


def test_a_run_s_page(long: Scene) -> None:
    assert peak(lambda: read_run(long.config.folder)) < MOST
    record = read_run(long.config.folder).record
    assert record is not None
    assert record.course.unknown == STATEMENTS


def test_metrics(tmp_path: Path) -> None:
    line = {"kind": "round", "site": "a", "tokens": 5, "loss": 1.0, "text": "x" * SIZE}
    with (tmp_path / FILE).open("w") as file:
        for number in range(STATEMENTS):
            file.write(json.dumps({**line, "round": number}) + "\n")
    assert peak(lambda: _lines(tmp_path / FILE)) < MOST
