"""The pictures' axes, ticks, marks, names and escapes."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from benchmarks.svg import Axis, Bar, Curve, Mark, Panel, picture
from hypothesis import given
from hypothesis import strategies as st

FRAME = (50.0, 40.0, 350.0, 240.0)
DECADES = Axis(1.0, 1000.0, "{:g}x".format, "across", logarithmic=True)
TENTHS = Axis(0.0, 1.0, "{:.1f}".format)
NAMESPACE = "{http://www.w3.org/2000/svg}"


def drawn(*panels: Panel, columns: int = 1) -> ET.Element:
    return ET.fromstring(picture(panels, 400, 300, columns))


def all_of(root: ET.Element, tag: str) -> list[ET.Element]:
    return list(root.iter(NAMESPACE + tag))


def place_of(root: ET.Element, text: str) -> tuple[float, float]:
    (found,) = (each for each in all_of(root, "text") if each.text == text)
    return float(found.attrib["x"]), float(found.attrib["y"])


def test_ticks_are_round_and_inside_the_limits() -> None:
    assert Axis(1.02, 1.31, str).ticks() == pytest.approx([1.1, 1.2, 1.3])
    assert Axis(0.0, 0.3, str).ticks() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert Axis(0.8, 2e4, str, logarithmic=True).ticks() == [1.0, 10.0, 100.0, 1e3, 1e4]
    assert Axis(2, 64, str, logarithmic=True, at=(2, 16, 64)).ticks() == (2, 16, 64)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_an_axis_has_ticks_in_order_inside_its_limits(low: float, room: float) -> None:
    axis = Axis(low, low + room, str)
    ticks = list(axis.ticks())
    assert len(ticks) >= 2
    assert ticks == sorted(set(ticks))
    assert axis.low <= ticks[0] <= ticks[-1] <= axis.high


def test_a_logarithmic_axis_gives_each_decade_as_much_room() -> None:
    assert [DECADES.share(10.0**n) for n in range(4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [TENTHS.share(value) for value in (0.0, 0.25, 1.0)] == [0.0, 0.25, 1.0]


def test_values_outside_of_an_axis_are_at_its_limits_and_nan_is_refused() -> None:
    assert [DECADES.share(value) for value in (-1.0, 0.0, math.inf)] == [0.0, 0.0, 1.0]
    assert [TENTHS.share(value) for value in (-math.inf, 7.0)] == [0.0, 1.0]
    assert Axis(3.0, 3.0, str).share(3.0) == 0.0
    with pytest.raises(ValueError, match="NaN has no place"):
        TENTHS.share(math.nan)


def test_every_tick_has_a_line_and_a_label_at_its_value() -> None:
    root = drawn(Panel("title", FRAME, DECADES, TENTHS))
    assert place_of(root, "10x") == (150.0, 256.0)
    assert place_of(root, "1000x")[0] == 350.0
    assert place_of(root, "0.0")[1] - place_of(root, "1.0")[1] == 200.0
    lines = {path.attrib["d"] for path in all_of(root, "path")}
    assert {"M150.0 40.0V240.0", "M50.0 40.0H350.0", "M50.0 40.0V240.0H350.0"} <= lines


def test_a_point_outside_of_the_range_is_a_triangle_at_the_edge() -> None:
    marks = [Mark(10.0, y, "#123456") for y in (0.5, 3.0, math.inf, -2.0)]
    root = drawn(Panel("", FRAME, DECADES, TENTHS, marks=marks))
    (inside,) = all_of(root, "circle")
    assert (inside.attrib["cx"], inside.attrib["cy"]) == ("150.0", "140.0")
    shapes = [each.attrib for each in all_of(root, "path") if "fill" in each.attrib]
    triangles = [each["d"] for each in shapes if each["fill"] == "#123456"]
    above, below = "M145.0 48.0h10l-5 -9z", "M145.0 232.0h10l-5 9z"
    assert triangles == [above, above, below]


def test_a_hollow_mark_has_an_edge_of_its_colour() -> None:
    marks = [Mark(10.0, 0.5, "#123456", hollow=True)]
    (circle,) = all_of(drawn(Panel("", FRAME, DECADES, TENTHS, marks=marks)), "circle")
    assert (circle.attrib["fill"], circle.attrib["stroke"]) == ("#ffffff", "#123456")


def test_names_of_marks_cover_neither_each_other_nor_marks_nor_curves() -> None:
    points = [(8.0, 0.5), (9.0, 0.5), (10.0, 0.5), (11.0, 0.5), (1000.0, 0.5)]
    marks = [Mark(*point, "#123456", f"mark {number}") for number, point in enumerate(points)]
    curve = Curve([(1.0, 0.1), (1000.0, 0.6)], "#654321")
    root = drawn(Panel("", FRAME, DECADES, TENTHS, [curve], marks))
    boxes = []
    for number in range(len(points)):
        x, y = place_of(root, f"mark {number}")
        (name,) = (each for each in all_of(root, "text") if each.text == f"mark {number}")
        left = x - 35 if name.attrib["text-anchor"] == "end" else x
        boxes.append((left, y - 8, left + 35, y + 1))
    for number, (left, top, right, bottom) in enumerate(boxes):
        assert FRAME[0] <= left
        assert right <= FRAME[2] + 16
        for x, y, r, b in boxes[number + 1 :]:
            assert right <= x or r <= left or bottom <= y or b <= top
        for circle in all_of(root, "circle"):
            x, y = float(circle.attrib["cx"]), float(circle.attrib["cy"])
            assert not (left < x < right and top < y < bottom)


def test_curves_are_joined_named_at_their_ends_and_have_intervals() -> None:
    ends = [("first", 0.52), ("second", 0.5), ("third", 0.1)]
    curves = [
        Curve([(1.0, 0.5), (1000.0, y)], "#123456", name, broken=name == "third", radius=3,
              intervals=[(10.0, 0.25, 0.75)])
        for name, y in ends
    ]  # fmt: skip
    root = drawn(Panel("", FRAME, DECADES, TENTHS, curves))
    lines = all_of(root, "polyline")
    assert lines[0].attrib["points"] == "50.0,140.0 350.0,136.0"
    assert ["stroke-dasharray" in line.attrib for line in lines] == [False, False, True]
    assert len(all_of(root, "circle")) == 6
    assert [path.attrib["d"] for path in all_of(root, "path")].count("M150.0 190.0V90.0") == 3
    places = [place_of(root, name) for name, _ in ends]
    assert [x for x, _ in places] == [358.0] * 3
    assert places[1][1] - places[0][1] == 12.0
    assert places[2][1] == 224.0


def test_bars_end_at_their_values() -> None:
    bars = [Bar("long", 100.0, "100 times", "#123456"), Bar("none", 0.0, "0 times", "#654321")]
    root = drawn(Panel("bars", FRAME, Axis(1.0, 1000.0, str, logarithmic=True), bars=bars))
    assert all(each.text for each in all_of(root, "text"))
    widths = [float(each.attrib["width"]) for each in all_of(root, "rect")[1:]]
    assert widths == [200.0, 0.0]
    assert place_of(root, "long")[1] < place_of(root, "none")[1]
    assert place_of(root, "100 times")[0] == 256.0


def test_all_text_is_escaped() -> None:
    odd = '<b> & "c"'
    axis = Axis(1.0, 10.0, lambda _: odd, odd, logarithmic=True)
    marks, curves = [Mark(1.0, 1.0, "#123456", odd)], [Curve([(1.0, 1.0)], "#123456", odd)]
    bars = [Bar(odd, 2.0, odd, "#123456")]
    root = drawn(Panel(odd, FRAME, axis, axis, curves, marks, bars))
    texts = [each.text for each in all_of(root, "text")]
    # Title, two axes' ticks, the axis's name, mark, curve, both texts of the bar.
    assert texts == [odd] * (1 + 2 * 2 + 1 + 1 + 1 + 2)


def test_panels_stand_in_rows() -> None:
    panels = [Panel(str(number), FRAME, DECADES) for number in range(3)]
    root = drawn(*panels, columns=2)
    assert root.attrib["viewBox"] == "0 0 800 600"
    moved = [group.attrib["transform"] for group in all_of(root, "g")]
    assert moved == ["translate(0 0)", "translate(400 0)", "translate(0 300)"]
