"""`dilocox status`, typed: a coordinator's folder, a site's folder, and what is neither."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dilocox.cli import main
from dilocox.cli.status import span
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.tools.report.status import status_of
from dilocox.training.launch import site_log

pytestmark = pytest.mark.waits

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main.main(["status", *map(str, arguments)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return call


def config_of(folder: Path) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "two", "folder": str(folder)},
            "model": {"path": "somewhere"},
            "outer": {"rounds": 5, "inner_steps": 20, "method": "dilocox"},
            "sites": {"lyon": {}, "paris": {}},
        }
    )


def a_round(number: int, at: float, **more: Any) -> list[dict[str, Any]]:
    row = {
        "kind": "round", "round": number, "step": 20 * (number + 1), "seconds": 30.0,
        "loss": 5.0 - number, "tokens_per_second": 1500.0, "wait_share": 0.02, "time": at, **more,
    }  # fmt: skip
    return [{**row, "site": "lyon"}, {**row, "site": "paris"}, row]


def a_run(folder: Path, *records: dict[str, Any]) -> Path:
    (folder / "coordinator").mkdir(parents=True)
    (folder / "coordinator" / "coordinator.lock").touch()
    (folder / "run.toml").write_text(config_of(folder).to_toml(), encoding="utf-8")
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """As if a coordinator ran there."""
    lock = os.open(folder / "coordinator" / "coordinator.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


def test_a_run_that_trains(tmp_path: Path, command: Command) -> None:
    now = time.time()
    before = {"kind": "evaluation", "site": "lyon", "after_round": -1, "val_loss": 6.25}
    after = {"kind": "evaluation", "site": "lyon", "after_round": 1, "val_loss": 4.5,
             "val_loss_by_source": {"web": 4.0, "tickets": 5.0},
             "val_accuracy": 0.625, "val_margin": 0.5}  # fmt: skip
    plan = {
        "kind": "plan", "round": 1, "inner_steps": 20, "fragments": 4, "codec": "int4",
        "delay": 1, "slots": 4, "reason": "nothing is measured yet",
    }  # fmt: skip
    said = [
        {"kind": "message", "about": "members", "text": "lyon enrolled"},
        {"kind": "message", "text": "lyon, round 1: \x1b[2Jits contribution does not count"},
    ]
    rows = [*a_round(0, now - 700), *a_round(1, now - 650)]
    folder = a_run(tmp_path / "run", before, plan, *rows, *a_round(2, now - 10)[1:], after, *said)
    with served(folder):
        code, out = command(folder)
    assert code == 0
    assert "run two: training" in out
    assert "round 2 is done, step 60 of 100 (60%), about 60 s left, loss 3.000" in out
    assert "held-out loss  4.5000 after round 1 (6.2500 before training)" in out
    assert "\n               web 4.0000, tickets 5.0000\n" in out
    assert "\n               62.5% of pairs ranked right, mean margin 0.5000\n" in out
    assert "plan           from round 1: 20 inner steps, 4 fragments, codec int4" in out
    assert "site paris  round 2  1.5k tokens/s  waited 2.0%  last report 10 s ago" in out
    # More than three of its rounds ago.
    assert "warning: lyon: its last report is 650 s old" in out
    assert "its contribution does not count" in out
    assert "\x1b" not in out
    assert "lyon enrolled" not in out
    # A lock is held, and nobody answers: that is said, and changes nothing.
    assert "warning: the coordinator does not answer" in out


def test_how_a_run_has_ended(tmp_path: Path, command: Command) -> None:
    folder = a_run(tmp_path / "run", *a_round(0, time.time() - 50))
    code, out = command(folder)
    assert (code, "ended without a word" in out, "to go on from here" in out) == (1, True, True)
    for phase, expected in (("finished", 0), ("stopped", 3), ("failed", 1)):
        summary = {"phase": phase, "reason": "why", "admission": {"lyon": {"copied": 2}}}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        code, out = command(folder)
        assert (code, f"run two: {phase} (why)" in out) == (expected, True)
    assert "warning: lyon: contributions flagged or not counted: copied 2" in out
    # Resumed, and killed then: the summary is of the start before.
    os.utime(folder / "summary.json", (1.0, 1.0))
    assert status_of(folder, time.time()).state == "ended without a word"


def test_nothing_is_trained_yet(tmp_path: Path, command: Command) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with served(folder):
        code, out = command(folder)
    assert (code, "run two: waits for sites" in out) == (0, True)


def test_damage_is_passed_over(tmp_path: Path, command: Command) -> None:
    folder = a_run(tmp_path / "run", *a_round(0, 1.0, loss="x"), {"kind": "round"}, {"kind": 3})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\nnull\n{"kind": "round", "round": 1')
    (folder / "summary.json").write_text("[]")
    (folder / "run.toml").write_text("= 3")
    code, out = command(folder)
    assert code == 1
    assert "metrics.jsonl: 2 damaged lines" in out
    assert "run file: " in out


def test_other_breaks_than_line_feeds_are_part_of_a_line(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", *a_round(0, 1.0))
    with (folder / "metrics.jsonl").open("a", newline="") as file:
        file.write('{"kind": "message", "text": "one\u2028two\x85three"}\n')
    found = status_of(folder, 2.0)
    assert found.warnings[-1] == "one\u2028two\x85three"
    assert not any("damaged" in line for line in found.warnings)


def test_a_site_keeps_a_journal(tmp_path: Path, command: Command) -> None:
    config = config_of(tmp_path / "at-lyon")
    site_log.note_joined(config, "lyon", "203.0.113.7:29400")
    assert (command(config.folder)[0], status_of(config.folder, 0.0).state) == (0, "joining")
    site_log.note(config, "lyon", "begins", round=0)
    for row in a_round(0, 0.0)[:1] + a_round(1, 0.0, loss=float("nan"))[:1]:
        kind = row.pop("kind")
        site_log.note(config, "lyon", kind, **{k: v for k, v in row.items() if k != "time"})
    code, out = command(config.folder)
    assert code == 0
    assert "run two, site lyon: training" in out
    assert "coordinator    203.0.113.7:29400" in out
    assert "round 1 is done, step 40 of 100 (40%), about 90 s left" in out
    site_log.note(config, "lyon", "ended", code=130, reason="asked to go (signal 15)")
    code, out = command(config.folder)
    assert (code, "left (asked to go (signal 15))" in out) == (3, True)
    site_log.note(config, "lyon", "ended", code=0, reason="")
    assert command(config.folder)[0] == 0


def test_a_site_whose_process_is_gone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()

    site_log.note(
        config, "lyon", "joined", run="two", steps=100, coordinator="x:1",
        process=gone.pid, host=socket.gethostname(),
    )  # fmt: skip
    found = status_of(tmp_path, time.time())
    assert (found.state, found.exit_code) == ("ended without a word", 1)


def test_all_of_it_as_json(tmp_path: Path, command: Command) -> None:
    folder = a_run(tmp_path / "run", *a_round(0, time.time()))
    code, out = command(folder, "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["round"], found["steps"]) == (1, 1, 0, 100)
    assert [site["name"] for site in found["sites"]] == ["lyon", "paris"]


def test_no_run_is_there(tmp_path: Path, command: Command) -> None:
    code, out = command(tmp_path)
    assert code == 1
    assert out == (
        f"dilocox: {tmp_path}: no run is here (no metrics.jsonl, no site-*.jsonl); give the run "
        "folder of the coordinator or of a site, such as runs/quickstart\n"
    )


def test_it_is_said_without_torch(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", *a_round(0, time.time()))
    script = (
        "import sys; from dilocox.cli.status import run; import argparse\n"
        "run(argparse.Namespace(run=sys.argv[1], json=False, token_file=None))\n"
        "sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], check=False, timeout=60)
    assert ended.returncode == 0


def test_times_are_for_people() -> None:
    assert [span(s) for s in (59.4, 600, 9000, 400_000)] == ["59 s", "10 min", "2.5 h", "4.6 days"]
