"""The committed results: what is claimed of them holds, and documents have their tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.quality import command as quality
from benchmarks.quality import data as quality_data
from benchmarks.quality import docs as quality_docs
from benchmarks.quality import jobs as quality_jobs
from benchmarks.quality import report as quality_report
from benchmarks.quality import rows as quality_rows
from benchmarks.quality import run as quality_run
from benchmarks.quality import tuning as quality_tuning
from benchmarks.quality.data import Text
from benchmarks.scaling import command as scaling
from benchmarks.wan import beside as wan_beside
from benchmarks.wan import docs as wan_docs
from benchmarks.wan import rows as wan_rows

from benchmarks import common, plan_check
from dilocox.coordinator.controller import link_policy
from dilocox.coordinator.controller.link_estimator import declared
from dilocox.training.payload_sizes import payload_sizes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def committed(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def quality_points() -> list[quality_report.Point]:
    """What the quality benchmark's rows come to."""
    return quality_report.points(quality_report.with_gaps(committed("quality-cpu")["rows"]))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_documents_have_the_tables_of_the_results() -> None:
    wan = committed("wan-cpu")
    assert (
        wan_rows.rows(committed("wan-cpu-runs")["rows"], wan["settings"]["parameters"])
        == (wan["rows"])
    )
    assert wan_docs.filled(page("measured.md"), wan["rows"]) == page("measured.md")
    assert quality_docs.filled(page("methods.md"), quality_points()) == page("methods.md")
    assert scaling.filled(page("scaling.md"), committed("scaling")["rows"]) == page("scaling.md")


def test_the_quality_benchmark_goes_on_with_all_of_its_committed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of other settings are refused, so settings that changed would end the benchmark."""
    monkeypatch.setattr(common, "machine", dict)
    monkeypatch.setattr(Text, "write", lambda *_: Text(tmp_path))
    bench = quality.Bench(quality.arguments().parse_args([]), tmp_path)
    files = sorted(RESULTS.glob("quality-*.json"))
    assert len(files) > 5
    for file in files:
        assert common.read_rows(file, "quality", bench._constants, claimed=False)


def test_dilocox_is_below_every_method_at_its_reduction_in_short_runs() -> None:
    """And at 500x or more has at most a quarter of the gap of DiLoCoX, tuned and as published."""
    paper = [point for point in quality_points() if point.cell[0] == "paper"]
    cells = quality_report.cells(paper)
    assert {(sites, iid) for _, sites, iid in cells} == {
        (4, False), (4, True), (2, False), (2, True)
    }  # fmt: skip
    for cell in cells:
        said = quality_report.verdicts([point for point in paper if point.cell == cell])
        assert len(said) == 2 + 7
        assert [line for line in said if "reached" in line] == said[:2]
        assert all("dominated by" in line for line in said[2:])


def test_in_long_runs_too_dilocox_is_below_every_rival() -> None:
    said = quality_report.verdicts([p for p in quality_points() if p.cell == ("long", 4, False)])
    rivals = {"diloco", "opendiloco", "intellect1", "cocktailsgd", "sparseloco", "dilocox-paper"}
    assert {line.split(" (")[0] for line in said} >= rivals
    (quarter,) = [line for line in said if ": dominated by" not in line]
    assert ": reached (" in quarter


def test_rows_that_are_averaged_are_of_one_plan() -> None:
    """A mean over seeds of what several versions of the controller chose is nobody's."""
    plans: dict[tuple[object, ...], set[str]] = {}
    for row in committed("quality-cpu")["rows"]:
        if row.get("target"):
            key = tuple(row[name] for name in ("label", "regime", "sites", "iid"))
            plans.setdefault(key, set()).add(row["plans"].split(" x")[0])
    assert len(plans) > 20
    assert {key: of for key, of in plans.items() if len(of) > 1} == {}


def test_rows_have_the_settings_and_rates_that_the_benchmark_would_train_them_with() -> None:
    tuning = RESULTS / "quality-tuning.json"
    trials = [quality_tuning.read(tuning, regime) for regime in ("paper", "long")]
    jobs = quality_jobs.select(quality.arguments().parse_args([]), *trials)
    wanted = {tuple(job.key.values()): job.settings_text for job in jobs}
    rows = committed("quality-cpu")["rows"]
    names = ("label", "regime", "sites", "iid", "seed")
    found = {tuple(row[name] for name in names): row["settings"] for row in rows}
    assert len(found) == len(rows) > 100
    assert {key: text for key, text in found.items() if wanted.get(key) != text} == {}


def test_rows_of_dilocox_are_of_the_plans_that_it_takes_today(tmp_path: Path) -> None:
    """So that a controller that chooses otherwise is measured anew before it is spoken of."""
    text = Text(tmp_path)
    checked = set()
    for row in committed("quality-cpu")["rows"]:
        where = tuple(row[name] for name in ("label", "regime", "sites", "iid"))
        if not row.get("target") or where in checked:
            continue
        checked.add(where)
        entries = quality_rows.all_entries()
        entry = next(each for each in entries if each.label == row["label"])
        settings = dict(word.split("=", 1) for word in row["settings"].split())
        rates = {"inner.learning_rate": float(settings["inner.learning_rate"])}
        job = quality_jobs.Job(entry, *where[1:], row["seed"], rates)
        config = quality_run.configuration(job, text, tmp_path / "run")
        menu = payload_sizes(config, quality_data.VOCABULARY)
        assert menu is not None
        plan = link_policy.choose(config, menu, declared(config.control), row["sites"], None)
        codec, _, steps = row["plans"].split(" x")[0].partition(" H=")
        assert (codec.removesuffix("+moments"), int(steps)) == (plan.codec, plan.inner_steps), where
        assert row.get("fragments", plan.fragments) == plan.fragments, where
        if row.get("outer_momentum") is not None:
            rates = row["outer_learning_rate"], row["outer_momentum"]
            assert rates == (plan.learning_rate, plan.momentum), where
    assert len(checked) > 20


def test_the_planner_is_as_close_as_it_is_said_to_be() -> None:
    median, worst = plan_check.errors(committed("plan_check-cpu")["rows"])
    assert median <= 0.15
    assert worst <= 0.30


def test_speed_is_kept_beside_sites_without_a_network() -> None:
    told = wan_beside.report(committed("wan-beside-wide-cpu")["rows"])
    assert "98.9% (98.5% to 99.1%) in 8 blocks" in told
    assert "0.22% of the speed without a network; dilocox is 446 times as fast (437 to 450)" in told
    told = wan_beside.report(committed("wan-beside-speedup-cpu")["rows"])
    assert "98.6% (96.0% to 99.1%) in 6 blocks" in told
    assert "0.18% of the speed without a network; dilocox is 541 times as fast (444 to" in told
