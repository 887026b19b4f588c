"""The benchmark around its measurements: what is asked for, kept, resumed and reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.wan import command as wan
from benchmarks.wan.grid import ALONE, BY_NAME, NONE, OURS, Case, Extent, cases

from dilocox.tools.testbed import Checked, LabError, Measured

EXTENT = Extent(2, 0, 1, 0, 100, 450, (400,), (2,), ("allreduce", OURS, "ddp"))
SPEED = {NONE: 20_000.0, OURS: 19_800.0, "allreduce": 50.0, "ddp": 49.0, ALONE: 24_000.0}


class FakeLab:
    """A lab that only remembers how it was shaped."""

    shaped: list[str]

    def __init__(self, sites: list[str]) -> None:
        self.sites = sites
        FakeLab.shaped = []

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def shape(self, link: str = "none") -> None:
        FakeLab.shaped.append(link)

    def verify(self) -> Checked:
        link = Measured("paris up", "paris", "lyon", 1.6e6, 1.59e6)
        return Checked([link], {("paris", "lyon"): 0.0002}, {"paris": 0.9, "lyon": 0.9})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Methods in the order in which they are measured; nothing real is."""
    found: list[str] = []

    def give(method: str) -> dict[str, Any]:
        found.append(method)
        return {
            "tokens_per_second": SPEED[method], "payload_bytes": 10.0, "seconds": 60.0,
            "steps": 1, "inner_steps": 1,
        }  # fmt: skip

    monkeypatch.setattr(wan, "Lab", FakeLab)
    monkeypatch.setattr(wan.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(wan.wan_run, "measure_none", lambda *_: give(NONE))
    monkeypatch.setattr(wan.wan_run, "measure_engine", lambda _l, _f, m, *_, limit: give(m.name))
    monkeypatch.setattr(wan.wan_peers, "measure_peer", lambda _l, _f, m, *_: give(m.name))
    monkeypatch.setattr(wan.wan_peers, "measure_alone", lambda *_: give(ALONE))
    return found


def test_measures_writes_and_goes_on_with_what_is_missing(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, wanted = tmp_path / "wan.json", cases(EXTENT)
    first = wan.Bench(tmp_path, results, EXTENT)
    first.measure(wanted[:3])
    # One more to make the link for.
    assert measured == [NONE, NONE, OURS, "allreduce"]
    assert FakeLab.shaped[0] == "none"
    link = FakeLab.shaped[1]
    measured.clear()
    again = wan.Bench(tmp_path, results, EXTENT)
    again.measure(wanted)
    assert measured == [ALONE, "ddp", OURS, NONE]
    # 1.6 Mbit/s is what the first measurements say that their link was.
    assert FakeLab.shaped == ["1600.000kbit"]
    assert link.endswith("kbit")
    assert again.report() == 0
    assert "which meets" in capsys.readouterr().out
    content = json.loads(results.read_text(encoding="utf-8"))
    assert [row["method"] for row in content["rows"]] == [NONE, ALONE, "allreduce", OURS, "ddp"]
    assert content["settings"]["parameters"] == 918_912
    assert results.with_suffix(".svg").read_text(encoding="utf-8").startswith("<svg")
    runs = json.loads((tmp_path / "wan-runs.json").read_text(encoding="utf-8"))["rows"]
    assert len(runs) == len(wanted)


def test_a_measurement_that_fails_leaves_the_others(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise LabError("ddp at paris has failed: why")

    monkeypatch.setattr(wan.wan_peers, "measure_peer", fail)
    bench = wan.Bench(tmp_path, None, EXTENT)
    bench.measure(cases(EXTENT))
    assert bench.report() == 1
    assert "ddp, block 1: ddp at paris has failed: why" in capsys.readouterr().err
    assert measured.count(OURS) == 2


def test_nothing_is_begun_that_would_last_longer(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # No exchange takes 800 steps of 51 ms and its start: 56 s. All of it would take minutes.
    monkeypatch.setattr(wan.time, "monotonic", lambda: 1000.0)
    bench = wan.Bench(tmp_path, None, EXTENT, minutes=1)
    bench.measure(cases(EXTENT))
    said = capsys.readouterr().err
    assert "2 sites: 7 measurements, some 6 minutes" in said
    assert "allreduce, block 0: left out, it takes some 77 s and the time is over" in said
    assert measured == [NONE, NONE, OURS, ALONE, OURS, NONE]


def test_what_ends_the_lab_ends_the_benchmark_in_one_line(
    monkeypatch: pytest.MonkeyPatch, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise LabError("paris up: 2.1 Mbit/s instead of 1.6")

    monkeypatch.setattr(sys, "argv", ["wan.py", "--quick"])
    monkeypatch.setattr(wan.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(wan, "unsupported_reason", lambda: None)
    monkeypatch.setattr(wan.wan_run, "measure_none", refuse)
    assert wan.main() == 1
    assert capsys.readouterr().err.splitlines()[-1] == "wan: paris up: 2.1 Mbit/s instead of 1.6"


def test_a_peer_that_is_not_installed_is_left_out_with_the_mend(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wan.wan_peers.importlib.util, "find_spec", lambda _: None)
    bench = wan.Bench(tmp_path, None, EXTENT)
    bench.measure([Case(2, 400, "torchft-diloco", 0), Case(2, 400, NONE, 0)])
    assert "left out, torchft is not installed: pip install" in capsys.readouterr().err
    assert measured == [NONE, NONE]
    assert bench.report() == 0
    assert wan.wan_peers.missing(BY_NAME["ddp"]) is None


def test_results_of_another_extent_are_refused(tmp_path: Path, measured: list[str]) -> None:
    results = tmp_path / "wan.json"
    wan.Bench(tmp_path, results, EXTENT).measure(cases(EXTENT)[:1])
    longer = Extent(**{**vars(EXTENT), "ours_steps": 200})
    with pytest.raises(SystemExit):
        wan.Bench(tmp_path, results, longer)
    runs = results.with_name("wan-runs.json")
    made = json.loads(runs.read_text())
    made["settings"]["tokens_per_step"] *= 2
    runs.write_text(json.dumps(made))
    with pytest.raises(SystemExit):
        wan.Bench(tmp_path, results, EXTENT)


def test_a_method_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["wan.py", "--quick", "--only", "diloxo"])
    monkeypatch.setattr(wan.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(wan, "unsupported_reason", lambda: None)
    assert wan.main() == 2
    said = capsys.readouterr().err
    assert "--only 'diloxo': no such method" in said
    assert "sparseloco" in said


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (["--quick", "--only", "diloco"], "diloco"),
        (["--only", "dilocox", "ddp", "--ratio", "4000"], "ddp"),
    ],
)
def test_a_method_that_the_other_options_leave_out_is_not_silently_left_out(
    told: list[str],
    name: str,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """References alone were measured for minutes, with exit code 0."""
    monkeypatch.setattr(sys, "argv", ["wan.py", *told, "--json", str(tmp_path / "new.json")])
    monkeypatch.setattr(wan.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(wan, "unsupported_reason", lambda: None)
    assert wan.main() == 2
    assert measured == []
    said = f"wan: --only '{name}': is not measured with the other options"
    assert said in capsys.readouterr().err


def test_a_document_that_is_not_there_is_refused_before_anything_is_measured(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    page = tmp_path / "measured.md"
    monkeypatch.setattr(sys, "argv", ["wan.py", "--quick", "--docs", str(page)])
    monkeypatch.setattr(wan.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(wan, "unsupported_reason", lambda: None)
    assert wan.main() == 2
    assert f"wan: --docs {page}: there is no such file" in capsys.readouterr().err
    assert measured == []


def test_options_leave_references_in() -> None:
    options = wan.arguments().parse_args(["--only", "dilocox", "--ratio", "400", "--sites", "2"])
    found = {case.method for case in cases(EXTENT) if wan.chosen(case, options)}
    assert found == {NONE, ALONE, OURS}
    assert not wan.chosen(Case(4, 400, OURS, 0), options)
    assert not wan.chosen(Case(2, 40, OURS, 0), options)


def test_tables_are_written_where_labs_cannot_be_made_if_all_is_measured(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`--docs` of committed results needs no root."""
    results, page = tmp_path / "wan.json", tmp_path / "page.md"
    wan.Bench(tmp_path, results, EXTENT).measure(cases(EXTENT))
    page.write_text("<!-- wan: begin 2 400 -->\n<!-- wan: end -->\n", encoding="utf-8")
    monkeypatch.setattr(wan, "FULL", EXTENT)
    monkeypatch.setattr(sys, "argv", ["wan.py", "--json", str(results), "--docs", str(page)])
    monkeypatch.setattr(wan.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(wan, "unsupported_reason", lambda: "network namespaces need root")
    assert wan.main() == 0
    assert "| allreduce | 50.0 | 0.25% |" in page.read_text(encoding="utf-8")
    assert "cannot be measured" not in capsys.readouterr().err


def test_one_line_and_code_3_where_labs_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["wan.py", "--quick"])
    monkeypatch.setattr(wan.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(wan, "unsupported_reason", lambda: "network namespaces need root")
    assert wan.main() == 3
    assert capsys.readouterr().err.splitlines() == [
        "wan: cannot be measured here: network namespaces need root"
    ]
