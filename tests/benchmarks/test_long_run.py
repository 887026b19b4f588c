"""`benchmarks/long_run.py` on a run of two rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import common, long_run

ROOT = Path(__file__).parents[2]


def test_a_short_run_is_driven_started_again_and_read(tmp_path: Path) -> None:
    """In one process here; the benchmark measures each in a process of its own."""
    config = long_run.run_config(tmp_path / "run", 2)
    rows = long_run.drive(config, 2)
    assert [row["rounds"] for row in rows] == [1, 2]
    assert rows[-1]["log_mb"] > 0.5
    assert long_run.restarted(config)["rounds"] == 2
    read = long_run.verified(config)
    assert read["statements"] > 2 * 500
    assert (read["log"], read["signatures"]) == ("PASS", "PASS")


def test_other_processes_start_on_the_folder_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start at the repository's root, where the folder's name made an empty run."""
    commands: list[list[str]] = []

    def ran(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdout=json.dumps({"case": "restart"}))

    common.commit()  # asks git once in a process, and not the function below
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(long_run, "drive", lambda *_: [])
    monkeypatch.setattr(long_run.subprocess, "run", ran)
    monkeypatch.setattr(sys, "argv", ["long_run.py", "--rounds", "1", "--folder", "run"])
    assert long_run.main() == 0
    folders = [command[command.index("--folder") + 1] for command in commands]
    assert folders == [str(tmp_path / "run")] * 2


def test_a_folder_with_an_earlier_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "record").mkdir()
    monkeypatch.setattr(sys, "argv", ["long_run.py", "--rounds", "1", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        long_run.main()
    assert ended.value.code == 2
    assert f"--folder {tmp_path}: is not empty; name a new folder" in capsys.readouterr().err


def test_memory_is_that_of_the_process_and_not_of_the_one_that_started_it() -> None:
    held = b"x" * 400_000_000
    code = "from benchmarks import long_run; print(long_run.peak_mb())"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert 20 < float(said.stdout) < 300
    del held


def test_memory_of_all_children_counts() -> None:
    """Two children at a time: the largest one alone is half of what they take."""
    code = "held = bytearray(b'x') * 50_000_000; print(1, flush=True); input()"
    pipe = subprocess.PIPE
    with long_run.watched_children() as peaks:
        started = [
            subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
            for _ in range(2)
        ]
        for child in started:
            assert child.stdout is not None
            assert child.stdout.readline() == "1\n"
        long_run.time.sleep(3 * long_run.LOOK)
        for child in started:
            child.communicate("\n")
    # This process may have other children: workers that tests share.
    own = {child.pid: peaks[child.pid] for child in started}
    assert all(50e6 < peak < 120e6 for peak in own.values())
    assert long_run.peak_mb(own) - long_run.peak_mb() >= 100
