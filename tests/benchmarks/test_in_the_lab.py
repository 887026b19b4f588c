"""Benchmarks of latency and of the scaling simulation, around their measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.scaling import check as scaling_check
from benchmarks.wan import run as wan_run

from benchmarks import latency
from dilocox.config.run_config import RunConfig
from dilocox.tools.planner.hardware_table import HardwareTable
from dilocox.tools.testbed import LabError

NONE_SPEED = 20_480.0


class FakeLab:
    """A lab that only remembers what it was made with."""

    made: list[tuple[int, str, float]] = []  # noqa: RUF012 - of all of them
    quota = 0.45

    def __init__(self, sites: list[str], link: str = "none", delay: float = 0.0) -> None:
        self.sites, self.link, self.delay = sites, link, delay
        FakeLab.made.append((len(sites), link, delay))

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def shape(self, link: str) -> None:
        self.link = link

    def verify(self) -> Any:
        rate = float(self.link.removesuffix("kbit")) * 1e3 if "kbit" in self.link else 2e7
        links = [SimpleNamespace(bits_per_second=rate)]
        return SimpleNamespace(links=links, round_trip=2 * self.delay + 0.0002)


RUN = {
    "tokens_per_second": 10_240.0, "wait_share": 0.25, "payload_bytes": 900_000.0,
    "plan": "as told", "wire_bytes": 1e6, "inner_steps": 20.0, "efficiency": 0.9, "reason": "",
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], int, Any]]:
    """Settings, steps and warm-up of all runs; nothing real is measured."""
    found: list[tuple[dict[str, Any], int, Any]] = []

    def run(_lab: Any, _folder: Path, settings: dict[str, Any], steps: int, warm_up: Any = None,
            limit: float = 0.0) -> dict[str, Any]:  # fmt: skip
        found.append((settings, steps, warm_up))
        return dict(RUN)

    FakeLab.made = []
    alone = {"tokens_per_second": NONE_SPEED, "inner_steps": 60, "wire_bytes": 0.0}
    for module in (latency, scaling_check):
        monkeypatch.setattr(module, "Lab", FakeLab)
        monkeypatch.setattr(module, "unsupported_reason", lambda: None)
    monkeypatch.setattr(wan_run, "measure_none", lambda *_: dict(alone))
    monkeypatch.setattr(wan_run, "measure_run", run)
    monkeypatch.setattr(latency.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(latency.common, "end_on_signals", lambda: None)
    return found


def test_every_round_trip_has_its_own_lab_and_reference(
    asked: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["latency.py", "--json", str(tmp_path / "latency.json")])
    assert latency.main() == 0
    assert FakeLab.made == [(2, "20mbit", 0.0), (2, "20mbit", 0.015), (2, "20mbit", 0.05)]
    rows = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))["rows"]
    assert [row["method"] for row in rows[:4]] == ["none", "dilocox", "diloco", "allreduce"]
    assert [row["round_trip_ms"] for row in rows[::4]] == [0.2, 30.2, 100.2]
    assert rows[0]["share_of_no_network"] == 1.0
    assert rows[1]["share_of_no_network"] == 0.5
    assert "100.2" in capsys.readouterr().out
    # As shipped: nothing is set.
    assert asked[0] == ({}, 400, None)


def test_a_round_trip_that_cannot_be_made_leaves_the_others(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise LabError("a round trip takes 300 ms")

    monkeypatch.setattr(wan_run, "measure_none", refuse)
    monkeypatch.setattr(sys, "argv", ["latency.py", "--quick"])
    assert latency.main() == 1
    assert "100 ms: a round trip takes 300 ms" in capsys.readouterr().err


def test_a_part_of_the_runs_does_not_replace_the_committed_results(
    asked: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shape(lab: FakeLab, link: str) -> None:
        lab.link = link
        if len(lab.sites) == 4:
            raise LabError("the machine is too busy")

    results, told = tmp_path / "scaling_check-cpu.json", tmp_path / "told.json"
    results.write_text("of all runs")
    monkeypatch.setattr(FakeLab, "shape", shape)
    monkeypatch.setattr(scaling_check, "CASES", scaling_check.CASES[:1])
    monkeypatch.setattr(scaling_check, "RESULTS", results)
    for more in ([], ["--json", str(told)]):
        monkeypatch.setattr(sys, "argv", ["check.py", *more])
        assert scaling_check.main() == 1
        assert "scaling_check: the machine is too busy" in capsys.readouterr().err
    assert results.read_text() == "of all runs"
    assert [row["sites"] for row in json.loads(told.read_text())["rows"]] == [2]


@pytest.mark.parametrize("module", [latency, scaling_check])
def test_one_line_and_code_3_where_labs_cannot_be_made(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "unsupported_reason", lambda: "network namespaces need root")
    monkeypatch.setattr(module.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert module.main() == 3
    said = capsys.readouterr().err
    assert said.endswith("cannot be measured here: network namespaces need root\n")


def test_the_simulation_plays_the_runs_that_were_made(asked: list[Any], tmp_path: Path) -> None:
    waits = scaling_check.CASES[:1]
    (two,) = scaling_check.measure(2, waits, tmp_path, HardwareTable.load())
    (four,) = scaling_check.measure(4, waits, tmp_path, HardwareTable.load())
    assert [settings for settings, *_ in asked] == [scaling_check.WAITS] * 2
    assert (two["step_ms"], two["step_drift"]) == (50.0, 0.0)
    # 20 steps, then 8 bits and a scale in 128 values of what takes 40 steps in 32, on a link that
    # carries .95 of its rate, and what votes and threads take of a shared core: 65 ms until the
    # payloads are there, 20 ms later on.
    seconds = 1.0 + 40 * 0.05 * 8.125 / 32 / 0.95 + 0.065 + 0.02 / 0.9
    assert two["predicted"] == pytest.approx(1024 * 20 / seconds, rel=0.05)
    assert two["ratio"] == pytest.approx(two["predicted"] / 10_240)
    # At four sites three payloads come over a link made for one and a half.
    seconds = 1.0 + 80 * 0.05 * 8.125 / 32 / 0.95 + 0.065 + 0.02 / 0.45
    assert four["predicted"] == pytest.approx(1024 * 20 / seconds, rel=0.05)
    assert 40 <= two["comm_to_compute"] <= 44
    again = scaling_check.played_again({"rows": [two, four]}, HardwareTable.load())
    for row, played in zip((two, four), again, strict=True):
        assert played["predicted"] == pytest.approx(row["predicted"], rel=1e-3)
        assert (played["measured"], played["plan"]) == (row["measured"], row["plan"])


def test_every_case_has_a_run_file(tmp_path: Path) -> None:
    runs: dict[str, RunConfig] = {
        case.name: wan_run.configuration(tmp_path, 4, case.settings, case.steps)
        for case in scaling_check.CASES
    }
    assert runs["hides"].outer.overlap == "keep"
    assert runs["hides"].control.adapt == "off"
    assert runs["waits"].outer.overlap == "none"
    assert runs["waits, reduce"].outer.exchange == "reduce"
    assert runs["chooses"].control.adapt == "link"
    assert {run.outer.inner_steps for name, run in runs.items() if name != "chooses"} == {20}
    assert set(scaling_check.QUICK) < set(runs)
    for settings, steps, _ in latency.METHODS.values():
        wan_run.configuration(tmp_path, 2, settings, steps)
