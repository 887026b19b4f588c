"""Benchmarks of the planner: the scaling table, the published figures, the check against measured
runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.scaling import check as scaling_check
from benchmarks.scaling import command as scaling
from benchmarks.scaling import plot as scaling_plot

from benchmarks import plan_check, published_107b
from dilocox.tools.planner.hardware_table import HardwareTable

ROOT = Path(__file__).parents[2]
TABLE = HardwareTable.load()


def test_predictions_are_near_the_measured_overlap_rules() -> None:
    rows = plan_check.check_overlap(
        json.loads(plan_check.RESULTS.read_text(encoding="utf-8")), TABLE
    )
    assert [row["run"] for row in rows] == ["none-0", "keep-5", "keep-20", "naive-20"]
    for row in rows:
        # Payloads are exact; that is no fit.
        assert row["predicted_payload"] == row["measured_payload"]
    median, worst = plan_check.errors(rows)
    assert median <= 0.15
    assert worst <= 0.30
    # Which rules hide the exchange, and which one does not.
    assert rows[0]["predicted_waited"] == pytest.approx(rows[0]["measured_waited"], abs=0.1)
    assert all(row["predicted_waited"] < 0.05 for row in rows[1:])


def test_errors_by_hand() -> None:
    assert plan_check.errors([{"ratio": 1.1}, {"ratio": 0.8}, {"ratio": 1.0}]) == (
        pytest.approx(0.1),
        pytest.approx(0.2),
    )


@pytest.mark.parametrize(
    ("main", "told"), [(plan_check.main, "--wan"), (scaling_check.main, "--again")]
)
@pytest.mark.parametrize("content", [None, "{", '{"benchmark": "overlap", "rows": []}'])
def test_a_file_of_other_results_is_refused_in_one_line(
    main: Callable[[], int],
    told: str,
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "rows.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(plan_check, "check_overlap", lambda *_: pytest.fail("it begins"))
    monkeypatch.setattr(sys, "argv", ["x", told, str(file)])
    with pytest.raises(SystemExit, match=rf"{file}: (holds no results|cannot be read as)"):
        main()


@pytest.mark.parametrize("module", [plan_check, published_107b])
def test_what_only_computes_has_no_short_form(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--quick` was taken and ignored."""
    monkeypatch.setattr(module.HardwareTable, "load", lambda: pytest.fail("it begins"))
    monkeypatch.setattr(sys, "argv", ["x", "--quick"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2


def test_what_the_published_speeds_imply_by_hand() -> None:
    outline: Any = SimpleNamespace(parameters=108_491_952_128, flops_per_token=6.5e11)
    rows = published_107b.assumptions(outline, TABLE.place("a800-40g:8x10"), 118.75e6)
    (row,) = [
        row
        for row in rows
        if row["gradient_bytes"] == 4
        and row["links"] == "one per site"
        and row["sequence_length"] == 2048
    ]
    # 434 GB of gradients once through 0.95 Gbit/s.
    seconds = 4 * 108_491_952_128 / 118.75e6
    assert row["allreduce_seconds"] == pytest.approx(seconds)
    assert row["tokens_per_step"] == pytest.approx(10.4 * seconds / (1 - 10.4 / 3728))
    step = row["tokens_per_step"] / 3728
    assert row["step_seconds"] == pytest.approx(step)
    # The sequences of one site fill a pipeline of 80 stages once.
    count = row["tokens_per_step"] / 2 / 2048
    at_full_use = (count + 79) * 6.5e11 * 2048 / (80 * 312e12)
    assert row["utilisation"] == pytest.approx(at_full_use / step)
    assert row["usual"]
    # A link per node cannot be: ten times fewer tokens would not fill the pipeline in time.
    assert not any(row["possible"] for row in rows if row["links"] == "one per node")


@pytest.mark.parametrize("scenario", scaling.SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_run_of_every_scenario(scenario: scaling.Scenario) -> None:
    config = scaling.run_of(scenario, 8)
    assert len(config.sites) == 8
    total = sum(config.site_batch(name) for name in config.sites)
    assert total == (1024 if scenario.strong else 8 * 128)
    assert config.outer.exchange == scenario.exchange
    assert config.control.steps == scenario.steps
    assert config.outer.device == scenario.device


def row(name: str, sites: int) -> dict[str, object]:
    return {
        "scenario": name, "sites": sites, "tokens_per_second": 1234.5, "efficiency": 0.5,
        "inner_steps": 20, "codec": "int4", "loss": 0.1, "payload_gb": 1.5, "link_share": 0.25,
        "work_share": 0.01,
    }  # fmt: skip


def test_the_document_is_filled_between_its_marks() -> None:
    text = "a\n<!-- scaling: begin weak, gather -->\nold\n<!-- scaling: end -->\nb\n"
    filled = scaling.filled(text, [row("weak, gather", 2), row("strong, gather", 4)])
    assert filled.startswith("a\n<!-- scaling: begin weak, gather -->\n| sites |")
    assert "| 2 | 1,234 | 50% | 20 | int4 | +10.0% | 1.5 GB | 25% | 1.0% |\n" in filled
    assert "old" not in filled
    assert "| 4 |" not in filled
    assert filled.endswith("<!-- scaling: end -->\nb\n")
    assert scaling.filled(filled, [row("weak, gather", 2)]) == scaling.filled(
        text, [row("weak, gather", 2)]
    )


def test_a_part_of_the_table_does_not_replace_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor the committed results, of which it kept three numbers of sites."""
    monkeypatch.setattr(scaling, "rows", lambda _: pytest.fail("it begins"))
    monkeypatch.setattr(sys, "argv", ["scaling", "--quick", "--docs"])
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    assert ended.value.code == 2
    assert "--docs: needs all numbers of sites; leave --quick out" in capsys.readouterr().err


def test_every_scenario_has_a_colour_of_its_own() -> None:
    assert len(set(scaling_plot.COLOURS)) >= len(scaling.SCENARIOS)


def test_the_picture_has_a_line_for_every_scenario() -> None:
    points = [("a", 2, 1.0, 0.1), ("a", 64, 0.5, 0.6), ("b", 2, 1.0, 0.1), ("b", 64, 0.9, 0.2)]
    keys = ("scenario", "sites", "efficiency", "loss")
    picture = scaling_plot.picture([dict(zip(keys, point, strict=True)) for point in points])
    assert picture.count("<polyline") == 2 * 2
    assert picture.startswith("<svg")
    assert "+60%" in picture
    # Each line is named at its end, in both panels.
    assert [picture.count(f">{name}</text>") for name in "ab"] == [2, 2]
    assert "nan" not in picture


@pytest.mark.slow
def test_two_sites_scale_as_the_table_says() -> None:
    rows = scaling.rows([2])
    assert [one["scenario"] for one in rows] == [each.name for each in scaling.SCENARIOS]
    assert all(0.5 < one["efficiency"] <= 1.0 for one in rows)
    # Uneven sites wait for the slowest if all take as many steps.
    speeds = {one["scenario"]: one["efficiency"] for one in rows}
    assert speeds["uneven, equal steps"] < 0.8 < speeds["uneven, gather"]


def wan_row(method: str, sites: int, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "sites": sites, "ratio": 400, "comm_to_compute": 400.0, "step_ms": 50.0,
        "tokens_per_second": speed, "wait_share": 0.9, "payload_bytes": 3675648.0, **more,
    }  # fmt: skip


WAN: dict[str, Any] = {
    "benchmark": "wan",
    "machine": {"cores": 2},
    "settings": {"quota_of_machine": 0.9, "parameters": 918_912, "extent": {"ours_steps": 600}},
    "rows": [
        wan_row("none", 2, 20_480.0, wait_share=None, payload_bytes=None),
        wan_row("allreduce", 2, 51.0),
        wan_row("intellect1", 2, 10_240.0),
        wan_row("ddp", 2, 50.0, wait_share=None),
        wan_row("allreduce", 4, 51.0),
    ],
}
"""As `wan.py` writes them, with a step of 50 ms and links on which gradients take 20 s."""


def test_rows_of_the_wan_benchmark_are_predicted_by_their_link_and_step_alone() -> None:
    rows = plan_check.check_wan(WAN, TABLE)
    assert [row["run"] for row in rows] == [
        "allreduce, 2 sites, 400x", "intellect1, 2 sites, 400x", "allreduce, 4 sites, 400x",
    ]  # fmt: skip
    two, rare, four = rows
    # 1,024 tokens in a step of 50 ms and 400 times that on the link; at four sites the link is
    # wider by the half that averaging in parts sends more.
    assert two["predicted"] == pytest.approx(1024 / (0.05 * 401), rel=0.02)
    assert four["predicted"] == pytest.approx(1024 / (0.05 * 401), rel=0.02)
    assert two["predicted_payload"] == pytest.approx(4 * 918_912, rel=0.01)
    # 100 steps, then 8 bits and a scale in 128 values: a quarter of 400 steps and some.
    assert rare["predicted"] == pytest.approx(
        1024 / 0.05 * 100 / (100 + 400 * 8.125 / 32), rel=0.05
    )
    assert rare["ratio"] == pytest.approx(rare["predicted"] / 10_240)


@pytest.mark.slow
def test_every_method_at_every_link_is_predicted() -> None:
    measured = Path(plan_check.__file__).parent / "results" / "wan-cpu.json"
    rows = plan_check.check_wan(json.loads(measured.read_text(encoding="utf-8")), TABLE)
    assert len(rows) >= 29
    median, worst = plan_check.errors(rows)
    assert median < 0.15
    assert worst < 0.30


def test_all_sets_of_rows_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [wan_row("allreduce", 2, 51.0)]
    (tmp_path / "wan.json").write_text(json.dumps({**WAN, "rows": rows}), encoding="utf-8")
    monkeypatch.setattr(plan_check, "check_overlap", lambda *_: [compared(1.1), compared(0.9)])
    monkeypatch.setattr(plan_check.common, "machine", dict)
    told = ["plan_check.py", "--wan", str(tmp_path / "wan.json"), "--json", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", told)
    assert plan_check.main() == 0
    said = capsys.readouterr().out
    assert "2 rows: median error 10.0%, worst 10.0%" in said
    assert "1 rows: median error" in said
    written = json.loads((tmp_path / "out").read_text(encoding="utf-8"))
    assert written["settings"]["against"] == "overlap-cpu.json, wan.json"
    assert len(written["rows"]) == 3


def compared(ratio: float) -> dict[str, Any]:
    return {
        "run": "a", "measured": 100.0, "predicted": 100.0 * ratio, "ratio": ratio,
        "measured_waited": 0.5, "predicted_waited": 0.5, "measured_payload": 10,
        "predicted_payload": 10,
    }  # fmt: skip
