"""Intervals, tables, result files."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import common


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(200):
        interval = common.median_interval([draw.gauss(5.0, 1.0) for _ in range(25)], resamples=300)
        assert interval.low <= interval.median <= interval.high
        covered += interval.low <= 5.0 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        common.median_interval([])


def test_command_names_the_benchmark_from_the_root_and_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "benchmarks" / "overlap" / "__main__.py"
    arguments = [str(script), "--quick", "--json", "/somewhere/here.json", "--json=/else/o.json"]
    monkeypatch.setattr(sys, "argv", arguments)
    expected = "python -m benchmarks.overlap --quick --json here.json --json=o.json"
    assert common.command() == expected
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "benchmarks" / "wan" / "beside.py")])
    assert common.command() == "python -m benchmarks.wan.beside"


def test_rows_are_flat(tmp_path: Path) -> None:
    file = tmp_path / "results" / "x.json"
    common.write_json(file, "x", {"cores": 2}, {"list": [1]}, [{"ratio": 0.9, "note": None}])
    assert json.loads(file.read_text())["rows"] == [{"ratio": 0.9, "note": None}]
    with pytest.raises(TypeError, match="row value nested is a list"):
        common.write_json(file, "x", {}, {}, [{"nested": [1]}])


def test_table_aligns_and_shows_what_is_missing() -> None:
    rows = [{"name": "a", "value": 1234.5}, {"name": "long", "value": None}]
    text = common.table(rows, {"name": "s", "value": ",.1f"})
    assert text.splitlines() == ["name    value", "a     1,234.5", "long        -"]


def test_what_another_machine_measured_is_not_gone_on_with(tmp_path: Path) -> None:
    here = {"cpu": "A", "cores": 2, "instructions": "AVX2", "core_gflops": 80, "load_before": 0.1}
    file = tmp_path / "speeds.json"
    common.refuse_other_machine(None, here)
    common.refuse_other_machine(file, here)
    file.write_text(json.dumps({"machine": here}))
    common.refuse_other_machine(file, {**here, "core_gflops": 92, "load_before": 2.0})
    for changed in ({"core_gflops": 35}, {"core_gflops": 120}, {"cores": 4}, {"cpu": "B"}):
        with pytest.raises(SystemExit, match=r"measured on another machine .*AVX2, 80 GFLOP/s"):
            common.refuse_other_machine(file, {**here, **changed})


def test_rows_are_gone_on_with_only_where_settings_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert common.read_rows(None, "beside", {}) == []
    assert common.read_rows(file, "beside", {"work": None}) == []
    known = {"benchmark": "beside", "settings": {"work": None, "more": 1}, "rows": [{"share": 1.0}]}
    file.write_text(json.dumps(known))
    assert common.read_rows(file, "beside", {"work": None}) == [{"share": 1.0}]
    for name, settings in (("beside", {"work": 0.01}), ("attacks", {"work": None})):
        with pytest.raises(SystemExit, match=r"rows\.json: holds results of other settings"):
            common.read_rows(file, name, settings)
