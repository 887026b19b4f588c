"""Benchmarks of the planner: the scaling table, the published figures, the check against measured
runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plan_check
import published_107b
import pytest
import scaling
import scaling_plot

from dilocox.plan.table import Table

ROOT = Path(__file__).parents[2]
TABLE = Table.load()


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
    expected = 1024 if scenario.strong else 8 * 128
    assert total == (expected * 3 // 4 if scenario.matched else expected)
    assert config.outer.exchange == scenario.exchange


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


def test_the_picture_has_a_line_for_every_scenario() -> None:
    points = [("a", 2, 1.0, 0.1), ("a", 64, 0.5, 0.6), ("b", 2, 1.0, 0.1), ("b", 64, 0.9, 0.2)]
    picture = scaling_plot.picture(points)
    assert picture.count("<polyline") == 2 * 2
    assert picture.startswith("<svg")
    assert "+60%" in picture
    assert "nan" not in picture


@pytest.mark.slow
def test_two_sites_scale_as_the_table_says() -> None:
    rows = scaling.rows([2])
    assert [one["scenario"] for one in rows] == [each.name for each in scaling.SCENARIOS]
    assert all(0.5 < one["efficiency"] <= 1.0 for one in rows)
    # Uneven sites wait for the slowest; with batches to match they do not.
    speeds = {one["scenario"]: one["efficiency"] for one in rows}
    assert speeds["uneven, gather"] < 0.8 < speeds["evened out, gather"]
