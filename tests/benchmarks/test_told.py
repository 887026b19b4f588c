"""What README, results.md and measured.md say of losses are the figures of committed results."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from benchmarks.quality import report as quality_report
from benchmarks.quality.rows import LEAD

from tests.benchmarks.test_committed import committed

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """Without what makes words bold."""
    return (ROOT / name).read_text(encoding="utf-8").replace("**", "")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return quality_report.with_gaps(committed("quality-cpu")["rows"])


def of(
    rows: list[dict[str, Any]], label: str, cell: quality_report.Cell = LEAD
) -> tuple[list[float], str]:
    """Gaps by seed, and the mean reduction in all as it is written."""
    own = [row for row in rows if (row["label"], quality_report.cell(row)) == (label, cell)]
    reduction = statistics.fmean(row["reduction_total"] for row in own)
    return [row["gap"] for row in own], f"{reduction:,.0f}x"


def percent(value: float, digits: int, sign: str = "+") -> str:
    return format(round(100 * value, digits) + 0.0, f"{sign}.{digits}f").replace(
        "-", "\N{MINUS SIGN}"
    )


def spread(gaps: list[float]) -> str:
    """`+7.2 % (6.4, 8.0)`; the range with signs where it begins below one."""
    digits = 1 if abs(statistics.fmean(gaps)) < 0.1 else 0
    sign = "+" if min(gaps) < 0.01 else ""
    least, most = (percent(value, digits, sign) for value in (min(gaps), max(gaps)))
    return f"{percent(statistics.fmean(gaps), digits)} % ({least}, {most})"


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("dilocox 500x", "`dilocox`, link for 500x"),
        ("dilocox 1000x", "`dilocox`, link for 1,000x"),
        ("dilocox 2750x", "`dilocox`, link for 2,750x"),
        ("dilocox 4000x", "`dilocox`, link for 4,000x"),
        ("diloco", "DiLoCo"), ("sparseloco", "SparseLoCo"), ("dilocox-paper", "DiLoCoX"),
    ],
)  # fmt: skip
def test_results_have_the_losses_of_short_runs(
    rows: list[dict[str, Any]], label: str, name: str
) -> None:
    gaps, reduction = of(rows, label)
    assert len(gaps) == 3
    told = re.escape(f"| {name} | {spread(gaps)} with {reduction} | ")
    steps = re.search(rf"^{told}(\d+)", page("docs/results.md"), re.MULTILINE)
    assert steps is not None
    taken = {each for row in rows if row["label"] == label and quality_report.cell(row) == LEAD
             for each in re.findall(r"H=(\d+)", row["plans"])}  # fmt: skip
    assert int(steps[1]) == max(map(int, taken))


def test_the_readme_has_the_loss_of_a_short_and_of_a_long_run(rows: list[dict[str, Any]]) -> None:
    text = page("README.md")
    gaps, reduction = of(rows, "dilocox 1000x")
    assert f"{spread(gaps)} with {reduction} fewer bytes" in text
    told = []
    for label in ("dilocox 1000x", "diloco"):
        gaps, reduction = of(rows, label, ("long", 4, False))
        mean, least, most = (
            percent(value, 1, "") for value in (statistics.fmean(gaps), min(gaps), max(gaps))
        )
        told.append(f"{mean} % ({least}, {most}) at {reduction}")
    assert f"{told[0]}; DiLoCo {told[1]}" in text


@pytest.mark.parametrize(
    "label",
    ["dilocox 100x", "dilocox 500x", "dilocox 1000x", "dilocox 2750x", "dilocox 4000x", "diloco",
     "intellect1", "dilocox-paper", "dilocox-paper published", "sparseloco", "cocktailsgd"],
)  # fmt: skip
def test_measured_has_the_losses_of_short_runs(rows: list[dict[str, Any]], label: str) -> None:
    gaps, reduction = of(rows, label)
    text = page("docs/measured.md")
    told = [line for line in text.splitlines() if line.startswith("| ") and reduction in line]
    assert any(spread(gaps) in line for line in told), (reduction, spread(gaps))


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        (("paper", 2, False), ("dilocox 1000x", "dilocox 2750x", "dilocox 4000x")),
        (("paper", 4, True), ("dilocox 500x",)),
    ],
)
def test_measured_has_the_losses_of_other_sites(
    rows: list[dict[str, Any]], cell: quality_report.Cell, labels: tuple[str, ...]
) -> None:
    text = " ".join(page("docs/measured.md").split())
    for label in labels:
        (gap,), reduction = of(rows, label, cell)
        assert f"{percent(gap, 1)} % at {reduction}" in text


def test_measured_has_the_loss_of_the_same_text_with_three_seeds(
    rows: list[dict[str, Any]],
) -> None:
    gaps, reduction = of(rows, "dilocox 1000x", ("paper", 4, True))
    assert len(gaps) == 3
    text = " ".join(page("docs/measured.md").split())
    assert f"{spread(gaps)} at {reduction}, where sites with a text of their own" in text


def test_measured_has_the_losses_of_two_sites_with_the_same_text(
    rows: list[dict[str, Any]],
) -> None:
    found = [of(rows, f"dilocox {n}x", ("paper", 2, True))[0][0] for n in (1000, 2750, 4000)]
    first, second, third = (percent(gap, 1) for gap in found)
    assert f"with the same text at both {first}, {second} and {third} %" in page("docs/measured.md")


@pytest.mark.parametrize("name", ["docs/results.md", "docs/measured.md"])
def test_long_runs_are_told_as_they_came_out(rows: list[dict[str, Any]], name: str) -> None:
    """With the number of seeds where there is more than one."""
    text = page(name)
    found = {
        label: of(rows, label, ("long", 4, False))
        for label in ("dilocox 1000x", "dilocox 3000x", "diloco", "sparseloco")
    }
    for gaps, reduction in found.values():
        mean = percent(statistics.fmean(gaps), 1, "")
        if len(gaps) == 1:
            assert f"{mean} % at {reduction}" in text
        else:
            seeds = {2: "two", 3: "three"}[len(gaps)]
            least, most = percent(min(gaps), 1, ""), percent(max(gaps), 1, "")
            assert re.search(
                rf"{mean} % \({least}, {most}(; {seeds} seeds[^)]*)?\) at {reduction}", text
            )
