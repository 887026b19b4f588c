"""Figures of pages on the time to a loss are those of the committed rows."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.time_to_loss import report
from benchmarks.time_to_loss.cases import BASELINE, OURS, UNDECLARED

from tests.benchmarks.test_told import committed, page, percent

RESULTS = "docs/results.md"


@pytest.fixture(scope="module")
def lines() -> dict[tuple[str, str], dict[str, Any]]:
    """The lines of the table of `perl`, by method and how their time is known."""
    found = report.lines(committed("time_to_loss-cpu")["rows"], "perl")
    assert {line["seed"] for line in found if line["method"] == OURS} == {0}, "pages say one seed"
    return {(line["method"], line["how"]): line for line in found}


def test_results_have_times_losses_and_bytes(lines: dict[tuple[str, str], dict[str, Any]]) -> None:
    text = page(RESULTS)
    alone, ours = lines[BASELINE, "no limit"], lines[OURS, "measured"]
    undeclared, bound = lines[UNDECLARED, "measured"], lines[BASELINE, "at least"]
    link = f"{ours['kbit_per_s']:.0f} kbit/s"
    assert f"| {alone['loss']:.4f} | 1x | {alone['minutes']:.1f} minutes |" in text
    assert (
        f"| {link} | {ours['loss']:.4f} ({percent(ours['gap'], 1)} %) | {ours['in_all']:.0f}x "
        f"| {ours['minutes']:.1f} minutes: {ours['over_synchronous']:.2f} times |"
    ) in text
    assert undeclared["minutes"] is None
    assert (
        f"| {link} | {undeclared['loss']:.4f} ({percent(undeclared['gap'], 1)} %) "
        f"| {undeclared['in_all']:.0f}x | not reached;"
    ) in text
    hours = f"{bound['minutes'] / 60:.0f} hours: {bound['over_synchronous']:.0f} times"
    assert f"| 1x | {hours} |" in text


def test_the_readme_has_the_times(lines: dict[tuple[str, str], dict[str, Any]]) -> None:
    ours, bound = lines[OURS, "measured"], lines[BASELINE, "at least"]
    told = (
        f"{ours['over_synchronous']:.1f} times its time without a network; synchronous "
        f"training on this link: {bound['over_synchronous']:.0f} times"
    )
    assert told in page("README.md")
