"""Intervals, tables, result files."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
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


def test_results_that_cannot_be_written_leave_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a kill in the middle: hours of measurements were lost with the last row."""
    file, write = tmp_path / "rows.json", Path.write_text
    common.write_json(file, "x", {}, {}, [{"block": 0}])

    def half(path: Path, text: str, **options: str) -> int:
        write(path, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        common.write_json(file, "x", {}, {}, [{"block": 0}, {"block": 1}])
    assert common.read_rows(file, "x", {}) == [{"block": 0}]
    assert list(tmp_path.iterdir()) == [file]


def test_results_go_through_links_and_pipes(tmp_path: Path) -> None:
    file, link, pipe = (tmp_path / name for name in ("rows.json", "link.json", "pipe"))
    file.write_text("{}")
    link.symlink_to(file)
    common.write_json(link, "x", {}, {}, [{"a": 1}])
    assert link.is_symlink()
    assert common.read_rows(file, "x", {}) == [{"a": 1}]
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    common.write_json(pipe, "x", {}, {}, [{"a": 2}])
    assert pipe.is_fifo()
    assert json.loads(os.read(reader, 1 << 16))["rows"] == [{"a": 2}]
    os.close(reader)


@pytest.mark.parametrize("text", ["", '{"benchmark": "x", "rows"', "[]"])
def test_a_file_that_holds_no_results_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text)
    for read in (lambda: common.read_rows(file, "x", {}),
                 lambda: common.refuse_other_machine(file, {})):  # fmt: skip
        with pytest.raises(SystemExit, match=r"rows\.json: holds no results.*name another file"):
            read()


def test_a_place_without_results_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = common.parser("Measures nothing.")
    fine = tmp_path / "new" / "rows.json"
    assert parser.parse_args(["--json", str(fine)]).json == fine
    assert not fine.parent.exists()
    (tmp_path / "file").write_text("")
    for place, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "rows.json", f"{tmp_path / 'file'} is no folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--json", str(place)])
        assert ended.value.code == 2
        assert f"argument --json: {place}: {why}" in capsys.readouterr().err


def test_numbers_of_things_are_above_0() -> None:
    assert common.positive("3") == 3
    for text in ("0", "-1", "2.5", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text}: expected a whole number"):
            common.positive(text)


def test_benchmarks_that_are_never_short_have_no_option_for_it() -> None:
    parser = common.parser("Computes.", quick=False)
    assert "--quick" not in parser.format_help()


def test_a_command_that_fails_is_named_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(common.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(common.CommandError, match=r"dilocox train a\.toml: ended with code 3"):
        common.run_dilocox("train", "a.toml")
