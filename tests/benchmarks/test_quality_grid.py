"""The controller's loss table, made from rows of a grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.quality import command as quality
from benchmarks.quality import grid as quality_grid
from benchmarks.quality import jobs as quality_jobs
from benchmarks.quality import run as quality_run
from benchmarks.quality.data import Text
from benchmarks.quality.grid import label

from dilocox.coordinator.controller import loss_model


def rows(**changed: float | None) -> list[dict[str, Any]]:
    """A row for each run: 2 synchronous, then 1 % more per step, 2 % per delay, 4 / kept."""
    made = []
    for entry in quality_grid.entries():
        value = 2.0
        if entry.method == "dilocox":
            kind, _, kept = str(entry.settings["compression.codec"]).partition(":")
            steps = int(entry.settings["outer.inner_steps"])
            value *= 1 + 0.01 * steps
            value *= 1 + 0.02 * float(entry.settings["outer.delay"]) / steps
            value *= 1 + {"topk": 0.4 / int(kept or 1), "int2": 0.05}.get(kind, 0)
        name = entry.label
        made.append({"label": name, "val_loss": changed.get(name, value), "steps": 1, "seed": 0})
    return made


def test_every_run_of_the_grid_makes_a_run_file(tmp_path: Path) -> None:
    options = quality.arguments().parse_args(["--loss-table"])
    jobs = list(quality_jobs.select(options, {}, {}))
    assert [job.entry for job in jobs] == quality_grid.entries()
    for job in jobs:
        config = quality_run.configuration(job, Text(tmp_path), tmp_path / "run")
        assert config.total_steps == 640


def test_parts_are_what_each_run_loses_over_the_one_without() -> None:
    made = quality_grid.measured_table(rows(), loss_model.committed(), "made")
    assert made["about"] == "made"
    assert made["inner_steps"][:5] == [1, 2, 5, 10, 20]
    assert made["local"][:5] == [0.01, 0.02, 0.05, 0.1, 0.2]
    assert made["flat"]["int2"][4] == 0.05
    assert made["delay"]["share"][2:] == [0.5, 1.0]
    # Five steps land two and a half late, which is two: 2 % x 2 / 5.
    assert made["delay"]["loss"][2][2:] == [0.008, 0.02]
    kept = made["topk"]["kept"]
    for row in made["topk"]["loss"][:5]:
        found = dict(zip(kept, row, strict=True))
        for density in kept:
            assert found[density] == pytest.approx(0.4 / density, rel=1e-3, abs=6e-6)


def test_noise_does_not_turn_the_order_round() -> None:
    lucky = {
        label(5, "none"): 1.5,
        label(10, "topk:5"): 2.0,
        label(2, "topk:82"): 5.0,
        label(10, "none", 1.0): 2.1,
    }
    made = quality_grid.measured_table(rows(**lucky), loss_model.committed(), "")
    assert made["local"] == sorted(made["local"])
    for column in zip(*made["topk"]["loss"], strict=True):
        assert list(column) == sorted(column)
    for row in made["topk"]["loss"]:
        assert row == sorted(row, reverse=True)
        assert row[-1] > 0
    for row in made["delay"]["loss"]:
        assert row == sorted(row)


def test_a_missing_or_diverged_run_makes_no_table() -> None:
    with pytest.raises(ValueError, match="grid synchronous has no row"):
        quality_grid.measured_table(rows()[1:], loss_model.committed(), "")
    with pytest.raises(ValueError, match="grid H=5 none has diverged"):
        quality_grid.measured_table(rows(**{label(5, "none"): None}), loss_model.committed(), "")


def test_the_text_is_the_table() -> None:
    made = quality_grid.measured_table(rows(), loss_model.committed(), "of, all [sorts]")
    text = quality_grid.as_text(made)
    assert json.loads(text) == made
    assert max(map(len, text.splitlines())) < 120
