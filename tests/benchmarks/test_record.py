"""What is made of runs with and without a record, against numbers worked by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from dilocox.config.run_config import load_run
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log import statements as s
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.run_history import RunHistory
from dilocox.tools.testbed import cgroups

SIGNER = s.Signer.from_hex("01" * 32)


def reports(seconds: float, rounds: int, start: float = 50.0) -> list[dict[str, Any]]:
    return [
        {
            "kind": "round",
            "site": site,
            "round": number,
            "time": start + seconds * number,
            "tokens": 300,
        }
        for number in range(rounds)
        for site in record.SITES
    ]


def test_speeds_are_those_of_the_seconds_that_both_runs_were_measured_in() -> None:
    # The second one began 4 s later and is half as fast; from its second round's end, at 58 s, on.
    fast, slow = reports(2.0, 9), reports(4.0, 6, start=54.0)
    fast[0]["time"] = -1000.0
    found, begin, end = record.speeds(fast, slow)
    assert found == pytest.approx([2 * 300 / 2.0, 2 * 300 / 4.0])
    assert (begin, end) == (58.0, 66.0)


def test_work_is_what_threads_beside_training_compute(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "cgroup.procs").write_text("7\n8\n9\n")
    ticks = record.TICKS
    for process, thread, name, user, system in (
        (7, 7, "paris:0.0", 90, 10),
        (7, 70, "paris:0.0", 3, 1),
        (7, 71, "gloo (tcp) loop", 2, 0),
        (8, 8, "coordinator", 4, 0),
    ):
        task = tmp_path / "proc" / str(process) / "task" / str(thread)
        task.mkdir(parents=True)
        rest = " ".join(["S", *["0"] * 10, str(user * ticks), str(system * ticks), "5", "5"])
        (task / "stat").write_text(f"{thread} ({name}) {rest}\n")
    found = record.used(group, tmp_path / "proc")
    assert (found.training, found.beside) == (100.0, 10.0)


def test_work_is_a_share_of_the_measured_seconds() -> None:
    course = [record.Used(float(t), 8.0 * t + 1000, 2.0 * t + (50 if t > 6 else 0))
              for t in range(10)]  # fmt: skip
    assert record.work_share(course, 1.5, 6.5) == pytest.approx(0.2)


def step(round_: int, flush: bool, payloads: dict[str, str]) -> Step:
    key = ExchangeKey.outer(round_, 0, 0)
    return Step(key, flush, 1, 0, (), (), (), "int4", "gather", 0.8, 0.5, 1, payloads)


def test_bytes_are_per_training_round_and_of_both_sites() -> None:
    course = RunHistory("run", "log", {})
    steps = (
        step(0, False, {"paris/0": "a", "lyon/0": "b"}),
        step(1, False, {"paris/0": "c", "lyon/0": "b"}),
        step(2, True, {"paris/0": "d"}),
    )
    course.steps = {each.key.text: each for each in steps}
    said = [SIGNER.sign(s.Statement(kind, {}, {"run": "run"}))
            for kind in (s.MANIFEST, s.COMMITMENT, s.COMMITMENT, s.STEP)]  # fmt: skip
    sizes = {"a": 100, "b": 10, "c": 1, "d": 5000, "theta": 70, "state": 30}
    assert record.bytes_of(course, said, sizes) == {
        "rounds": 2,
        "log_bytes_per_round": round((len(said[1]) * 2 + len(said[3]) + 3) / 2),
        "commitment_bytes_per_round": len(said[1]) + 1,
        "payload_bytes_per_round": round(111 / 2),
        "other_bytes": 100,
    }


def test_states_lie_by_rounds(tmp_path: Path) -> None:
    assert record.state_bytes(tmp_path) == 0
    for round_, size in ((0, 100), (1, 300)):
        place = tmp_path / "record" / "store" / "states" / f"{round_:08d}" / "sha256" / "ab"
        place.mkdir(parents=True)
        (place / "cd").write_bytes(bytes(size))
    assert record.state_bytes(tmp_path) == 200


def test_runs_are_compared_with_those_beside_them() -> None:
    """The machine was half as fast in the second turn: that is no cost of the record."""
    bytes_on = {"log_bytes_per_round": 7, "state_bytes_per_round": 0, "other_bytes": 100}
    bytes_states = {**bytes_on, "state_bytes_per_round": 300}
    pairs: list[dict[str, Any]] = [
        {"record": name, "turn": turn, "tokens_per_second": share * speed, "beside": speed,
         "work": 0.013 if name == "on" else 0.01, "work_beside": 0.01, **more}
        for turn, speed in enumerate((1000.0, 500.0))
        for name, share, more in (
            ("off", 1.0, {}), ("on", 0.99, bytes_on), ("states", 0.9, bytes_states),
        )
    ]  # fmt: skip
    off, on, states = record.rows_of(pairs)
    assert (off["ratio"], off["pairs"], off.get("theta_bytes")) == (1.0, 2, None)
    assert (on["ratio"], on["ratio_low"], on["ratio_high"]) == (0.99, 0.99, 0.99)
    assert (off["work"], on["work"]) == (0.0, pytest.approx(0.003))
    assert (on["log_bytes_per_round"], on["state_bytes_per_round"], on["theta_bytes"]) == (
        7,
        0,
        100,
    )
    assert (states["ratio"], states["state_bytes_per_round"]) == (0.9, 300)


def test_all_settings_are_runs_that_the_run_file_allows(tmp_path: Path) -> None:
    found = {
        name: load_run(record.run_file(tmp_path, name, given, 3)).record
        for name, given in record.SETTINGS.items()
    }
    assert [each.enabled for each in found.values()] == [False, True, True]
    assert [each.states_every for each in found.values()] == [0, 0, 1]


def test_pairs_of_another_machine_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were mixed with those of this machine, and filed under its name."""
    settings = {
        "sites": 2, "inner_steps": record.INNER_STEPS, "fragments": 2, "codec": "int4",
        "warm_up_rounds": record.WARM_UP_ROUNDS, "measured_rounds": 20,
    }  # fmt: skip
    there = {"cpu": "there", "cores": 2, "core_gflops": 50}
    content = {"benchmark": "record-pairs", "settings": settings, "machine": there, "rows": []}
    (tmp_path / "r-pairs.json").write_text(json.dumps({**content, "rows": [{"record": "off"}]}))
    monkeypatch.setattr(sys, "argv", ["record.py", "--json", str(tmp_path / "r.json")])
    monkeypatch.setattr(record.cgroups, "unsupported_reason", lambda _: None)
    monkeypatch.setattr(record.common, "machine", lambda: {**there, "cpu": "here"})
    monkeypatch.setattr(record, "measured", lambda *_: pytest.fail("it is measured"))
    with pytest.raises(SystemExit, match="measured on another machine than this"):
        record.main()


def test_what_is_measured_is_reported_where_nothing_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of committed pairs needed root, token files, and their own machine."""
    results = tmp_path / "record-cpu.json"
    for name in ("record-cpu.json", "record-cpu-pairs.json"):
        shutil.copy(record.common.RESULTS / name, tmp_path)
    before = results.read_bytes()
    told = ["record.py", "--pairs", "3", "--rounds", "14", "--json", str(results)]
    monkeypatch.setattr(record.cgroups, "unsupported_reason", lambda _: "no control groups")
    monkeypatch.setattr(record.common, "machine", lambda: {"cpu": "another"})
    monkeypatch.setattr(sys, "argv", told)
    assert record.main() == 0
    assert "on          3  0.9853" in capsys.readouterr().out
    assert results.read_bytes() == before
    monkeypatch.setattr(sys, "argv", [*told, "--pairs", "4"])
    assert record.main() == 3


@pytest.mark.skipif(
    cgroups.unsupported_reason(cgroups.find()) is not None, reason="no control groups"
)
def test_what_a_failed_run_leaves_is_ended_and_hides_no_reason() -> None:
    """The processes of a killed run end a little later than the run, and keep the group busy."""
    used: list[Path] = []

    def fail() -> None:
        hierarchy = cgroups.find()
        assert hierarchy is not None
        with record.quotas(hierarchy) as groups:
            used.extend(groups)
            lives = ["sh", "-c", "sleep 60 >/dev/null & echo up; wait"]
            run = subprocess.Popen(cgroups.entered(groups[0], lives), stdout=subprocess.PIPE)
            assert run.stdout is not None
            assert run.stdout.readline() == b"up\n"
            run.kill()
            run.communicate()
            raise record.RunError("the run's own reason")

    with pytest.raises(record.RunError, match="the run's own reason"):
        fail()
    assert len(used) == 2
    assert not any(group.exists() for group in used)
