"""What is made of a run of unequal sites, against numbers worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.uneven import command as uneven
from benchmarks.uneven import weights as uneven_weights

from dilocox.tools.testbed.results import RunResult, SiteResult, Window


def result() -> RunResult:
    records: list[dict[str, Any]] = [
        {"kind": "round", "site": site, "round": number, "steps": steps + number % 2,
         "exchange_work_seconds": 0.5}
        for number in range(4)
        for site, steps in zip(uneven.SPEEDS, (12, 9, 6, 3), strict=True)
    ]  # fmt: skip
    sites = {
        site: SiteResult(100.0 * speed, 0.1, 0, 0, 0, 0.0, 0.0)
        for site, speed in uneven.SPEEDS.items()
    }
    window = Window(2, 3, 0.0, 10.0)
    return RunResult("x", "dilocox", window, sites, 0, 0.0, 0, {}, records, Path())


def test_shares_are_of_the_sites_alone() -> None:
    alone = {site: 125.0 * speed for site, speed in uneven.SPEEDS.items()}
    alone["rome"] = 50.0
    cores = {site: 0.5 * speed for site, speed in uneven.SPEEDS.items()}
    *sites, every = uneven.rows_of("by-speed", result(), alone, cores)
    assert [row["share"] for row in sites] == [0.8, 0.8, 0.8, 0.5]
    # 255 of 100 + 125 x 2.3 - 100 + 50.
    assert every["share"] == pytest.approx(255 / 337.5, abs=1e-4)
    assert [row["inner_steps"] for row in sites] == [12.5, 9.5, 6.5, 3.5]
    # One second of work in ten: a fifth of half a core, and four times as much of a quarter of it.
    assert (sites[0]["work_share"], sites[3]["work_share"]) == (0.2, 0.8)


def test_quotas_are_in_proportion_to_the_speeds() -> None:
    found = uneven.quotas(0.51)
    assert found == {"paris": 0.2, "lyon": 0.16, "oslo": 0.1, "rome": 0.05}
    assert max(uneven.quotas(64.0).values()) == 1.0


def test_both_arrangements_are_runs_that_the_run_file_allows(tmp_path: Path) -> None:
    for steps in ("by-speed", "equal"):
        config = uneven.configuration(tmp_path, steps, 3, steps, 64, 12)
        assert (config.control.steps, list(config.sites)) == (steps, list(uneven.SPEEDS))
    assert uneven.configuration(tmp_path, "alone", 3, "equal", 64, 4).outer.delay == 2


def test_the_best_rate_is_that_of_the_lowest_loss() -> None:
    rows = [
        {"rule": rule, "data": "iid", "outer_learning_rate": rate, "val_loss": loss}
        for rule, rate, loss in (("equal", 0.6, 2.0), ("equal", 0.8, 1.9), ("tokens", 1.0, 1.0))
    ]
    assert uneven_weights.best_rate(rows, "equal", "iid") == 0.8
