"""The benchmark of 0G Storage, once, and its committed figures in the docs."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import common, zerog


@pytest.mark.slow
def test_the_benchmark_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in zerog.NEEDED:
        pytest.importorskip(package)
    monkeypatch.setattr("sys.argv", ["zerog", "--quick", "--json", str(tmp_path / "a.json")])
    assert zerog.main() == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert len(rows) == zerog.QUICK_REPEATS
    assert all(row[f"{name}_mb_s"] > 0 for row in rows for name in zerog.RATES)


def test_the_page_says_what_was_measured() -> None:
    rows = json.loads(zerog.RESULTS.read_text())["rows"]
    page = (common.ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    said = re.findall(r"^\| (hash|up|down) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, *_ in said] == list(zerog.RATES)
    for name, *cells in said:
        for cell, kind in zip(cells, ("mb_s", "cpu_mb_s"), strict=True):
            values = [row[f"{name}_{kind}"] for row in rows]
            middle = statistics.median(values)
            assert cell == f"{middle:.0f} ({min(values):.0f} to {max(values):.0f})"


def test_an_emulator_that_does_not_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in zerog.NEEDED:
        pytest.importorskip(package)
    monkeypatch.setattr("sys.argv", ["zerog", "--quick"])
    monkeypatch.setattr(common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(zerog.sys, "executable", "/bin/false")
    assert zerog.main() == 1
    assert capsys.readouterr().err == "zerog: the emulator has ended with code 1\n"
