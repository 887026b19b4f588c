"""Charts against geometry worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilocox.tools.report import charts
from dilocox.tools.report.charts import (
    Heading,
    Series,
    Wording,
    bar_chart,
    line_chart,
    log_ticks,
    nice_ticks,
    thinned,
)

pytestmark = pytest.mark.waits

INSIDE = charts.HEIGHT - charts.TOP - charts.BOTTOM


def say(value: float) -> str:
    return f"{value:g}"


def test_a_line_from_corner_to_corner() -> None:
    chart = line_chart(
        Heading("a", "A", "step"), [0, 10], [Series("v", "l", [0.0, 5.0])], Wording(say)
    )
    assert chart is not None
    assert chart.places == (charts.LEFT, charts.WIDTH - charts.RIGHT)
    low, high = charts.HEIGHT - charts.BOTTOM, charts.TOP
    assert chart.lines[0].path == f"M{charts.LEFT} {low}L{charts.WIDTH - charts.RIGHT} {high}"
    assert chart.readings == ("step 0: v 0", "step 10: v 5")
    assert chart.rows == (("0", "0"), ("10", "5"))
    assert [tick.text for tick in chart.y_ticks] == ["0", "1", "2", "3", "4", "5"]


def test_gaps_break_a_line_and_are_bridged_where_values_are_sparse() -> None:
    values = [1.0, None, 2.0, 3.0]
    lines = [Series("a", "l", values), Series("b", "l", values, sparse=True)]
    chart = line_chart(Heading("a", "A", "x"), [0, 1, 2, 3], lines, Wording(say))
    assert chart is not None
    assert [line.path.count("M") for line in chart.lines] == [2, 1]
    assert [len(line.dots) for line in chart.lines] == [0, 3]
    assert chart.marks[1] == (None, None)
    assert chart.readings[1] == "x 1: no value"


def test_a_logarithmic_scale() -> None:
    series = [Series("v", "l", [10.0, 100.0, 1000.0])]
    chart = line_chart(Heading("a", "A", "x"), [0, 1, 2], series, Wording(say), logarithmic=True)
    assert chart is not None
    assert [tick.text for tick in chart.y_ticks] == ["10", "100", "1000"]
    assert chart.marks[1][0] == pytest.approx(charts.TOP + INSIDE / 2)


def test_bars_stand_on_each_other() -> None:
    layers = [Series("a", "x", [3.0, 0.0]), Series("b", "y", [1.0, 4.0])]
    chart = bar_chart("a", "A", "round", [1, 2], layers, say=say)
    assert chart is not None
    lower, upper, single = chart.bars
    assert lower.y == pytest.approx(upper.y + upper.height, abs=0.11)
    assert lower.height == pytest.approx(3 * upper.height, abs=0.3)
    assert single.look == "y"
    assert (single.y, single.height) == (charts.TOP, INSIDE)
    assert chart.readings == ("round 1: a 3, b 1", "round 2: a 0, b 4")


def test_nothing_to_draw() -> None:
    assert line_chart(Heading("a", "A", "x"), [], [Series("v", "l", [])], Wording(say)) is None
    assert line_chart(Heading("a", "A", "x"), [0], [Series("v", "l", [None])], Wording(say)) is None
    assert bar_chart("a", "A", "x", [1], [Series("v", "l", [0.0])], say=say) is None
    one = line_chart(Heading("a", "A", "x"), [7], [Series("v", "l", [2.0])], Wording(say))
    assert one is not None
    assert len(one.lines[0].dots) == 1


@given(st.integers(0, 5000), st.integers(1, 50))
def test_thinning_keeps_first_and_last(count: int, most: int) -> None:
    kept = thinned(count, most)
    assert len(kept) <= most + 1
    assert kept == sorted(set(kept))
    if count:
        assert (kept[0], kept[-1]) == (0, count - 1)


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
@example(0.0, 5e-324)
@example(1e-11, 2e-11)
@example(1e9, 1e9 + 1e-6)
def test_ticks_hold_the_values(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    room = (high - low) * 1e-6 + abs(low) * 1e-9 + 1e-9
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= low + room
    assert ticks[-1] >= high - room
    assert log_ticks(1.0, 10.0 ** (abs(a) % 20))[0] == 1.0
