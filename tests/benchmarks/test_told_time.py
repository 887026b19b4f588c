"""Figures of pages on the time to a loss are those of the committed rows."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from benchmarks.time_to_loss import report
from benchmarks.time_to_loss.cases import BASELINE, OURS, TOLD, UNDECLARED

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


@pytest.fixture(scope="module")
def second() -> list[dict[str, Any]]:
    """The lines of the second protocol."""
    return report.lines(committed("time_to_loss_second-cpu")["rows"], "perl")


def test_results_have_the_times_of_the_second_protocol(second: list[dict[str, Any]]) -> None:
    text = page(RESULTS)
    for line in second:
        loss, seed, minutes = f"{line['loss']:.4f}", line["seed"], f"{line['minutes']:.1f} minutes"
        if line["method"] == TOLD:
            assert (
                f"told of messages, seed {seed} | {line['kbit_per_s']:.0f} kbit/s "
                f"| {loss} ({percent(line['gap'], 1)} %) | {line['in_all']:,.0f}x "
                f"| {minutes}: {line['over_synchronous']:.2f} times |"
            ) in text
        elif line["how"] == "no limit":
            assert f"| synchronous, seed {seed} | no limit | {loss} | 1x | {minutes} |" in text
    (bound,) = (line for line in second if line["how"] == "at least")
    hours = f"{bound['minutes'] / 60:.0f} hours: {bound['over_synchronous']:.0f} times"
    assert f"| 1x | {hours} |" in text


def test_the_readme_has_the_times(
    lines: dict[tuple[str, str], dict[str, Any]], second: list[dict[str, Any]]
) -> None:
    readme = page("README.md")
    told = [line for line in second if line["method"] == TOLD]
    (bound,) = (line for line in second if line["how"] == "at least")
    ratios = [line["over_synchronous"] for line in told]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    fewer = {f"{line['in_all']:,.0f}x" for line in told}
    assert len(ratios) == 2
    assert f"| {statistics.fmean(ratios):.2f} times its time without a network ({each})" in readme
    assert any(f"; {each} fewer bytes;" in readme for each in fewer)
    assert f"on this link: {bound['over_synchronous']:.0f} times" in readme
    assert f"(before: {lines[OURS, 'measured']['over_synchronous']:.1f} times) |" in readme
