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


def test_a_call_that_ends_while_it_writes_leaves_the_earlier_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come at any time (`end_on_signals`), and the file holds hours of rows."""
    file = tmp_path / "x.json"
    common.write_json(file, "x", {}, {"seed": 0}, [{"ratio": 0.9}])

    def half(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        raise SystemExit(143)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", half)
        with pytest.raises(SystemExit):
            common.write_json(file, "x", {}, {"seed": 0}, [{"ratio": 0.9}, {"ratio": 0.8}])
    assert common.read_rows(file, "x", {"seed": 0}) == [{"ratio": 0.9}]
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_device_is_written_and_stays_a_device() -> None:
    other, device = os.openpty()
    try:
        common.write_json(Path(os.ttyname(device)), "x", {}, {}, [])
        assert Path(os.ttyname(device)).is_char_device()
        assert os.read(other, 1) == b"{"
    finally:
        os.close(device)
        os.close(other)


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
        with pytest.raises(SystemExit, match=r"rows\.json: holds (no )?results of"):
            common.read_rows(file, name, settings)


def test_results_survive_a_kill_in_the_midst_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss took hours: what is there stays until the new file is complete."""
    file = tmp_path / "x.json"
    common.write_json(file, "x", {}, {}, [{"loss": 1.5}])
    before = file.read_text()

    def killed(descriptor: int) -> None:
        os.ftruncate(descriptor, 20)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            common.write_json(file, "x", {}, {}, [{"loss": 1.5}, {"loss": 1.4}])
    assert file.read_text() == before
    link = tmp_path / "link.json"
    link.symlink_to(file)
    common.write_json(link, "x", {}, {}, [{"loss": 1.4}])
    assert link.is_symlink()
    assert json.loads(file.read_text())["rows"] == [{"loss": 1.4}]


def test_a_row_names_the_commit_of_the_code_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the commit that the repository is at when a run of half an hour has ended."""

    def git(*words: str) -> None:
        own = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(own, cwd=tmp_path, check=True, capture_output=True)

    for name in ("benchmarks/common.py", "benchmarks/results/x.json", "docs/a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "One")
    monkeypatch.setattr(common, "__file__", str(tmp_path / "benchmarks" / "common.py"))
    common.commit.cache_clear()
    try:
        # A benchmark that goes on with committed results has changed them, and no code.
        (tmp_path / "benchmarks/results/x.json").write_text("2")
        (tmp_path / "docs/a.md").write_text("2")
        first = common.commit()
        assert first is not None
        assert not first.endswith("+")
        (tmp_path / "benchmarks/common.py").write_text("2")
        git("commit", "-am", "Two")
        assert common.commit() == first
        common.commit.cache_clear()
        assert common.commit() != first
        (tmp_path / "benchmarks/common.py").write_text("3")
        common.commit.cache_clear()
        assert str(common.commit()).endswith("+")
    finally:
        common.commit.cache_clear()


def test_a_file_that_holds_no_results_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text, reason in (("{", "cannot be read"), ("[]", "no results of x"), ("{}", "no results")):
        file.write_text(text)
        with pytest.raises(SystemExit, match=rf"rows\.json: .*{reason}"):
            common.read_rows(file, "x", {})


def test_rows_of_another_text_are_not_gone_on_with() -> None:
    rows = [{"seed": 0, "text": "aa"}, {"seed": 1, "text": "bb"}, {"seed": 2}]
    rows += [{"seed": 3, "text": None}]
    file = Path("x.json")
    for seed, text in ((0, "aa"), (1, "bb"), (2, "cc"), (3, "dd")):
        common.refuse_other_text(file, rows, text, {"seed": seed})
    with pytest.raises(SystemExit, match=r"x\.json: its rows of seed 0 are of another text \(aa\)"):
        common.refuse_other_text(file, rows, "bb", {"seed": 0})


def test_a_number_of_runs_is_one_or_more() -> None:
    assert common.positive("3") == 3
    for text in ("0", "-2", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text}: give a whole number"):
            common.positive(text)


HOLD = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks import common
common.read_rows(Path(sys.argv[1]), "x", {{}})
print("begun", flush=True)
sys.stdin.read()
"""


def test_two_benchmarks_do_not_write_to_one_file(tmp_path: Path) -> None:
    """Each writes all of its rows, so the rows of the other would be gone."""
    script, file = tmp_path / "hold.py", tmp_path / "x.json"
    script.write_text(HOLD.format(root=str(common.ROOT)))
    with subprocess.Popen(
        [sys.executable, str(script), str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        with pytest.raises(SystemExit, match=r"x\.json: another benchmark uses it"):
            common.read_rows(file, "x", {})
        assert common.read_rows(file, "x", {}, claimed=False) == []
        process.communicate(b"")
    # The end of a process frees its file, and a process may read its own file twice.
    for _ in range(2):
        assert common.read_rows(file, "x", {}) == []


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = common.parser("One line.")
    assert parser.parse_args(["--json", str(tmp_path / "new" / "x.json")]).json.name == "x.json"
    (tmp_path / "plain").write_text("")
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "plain" / "x.json", "plain is no folder that can be written to"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(["--json", str(path)])
        assert reason in capsys.readouterr().err
