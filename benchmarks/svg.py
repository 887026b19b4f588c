"""Draws charts as SVG text: panels with linear or logarithmic axes, curves, marks, bars and names.

A plot says what is drawn, as data; `picture` is a pure function of it. No library does this: those
that write SVG (svg.py, drawsvg) have no axes, and those of charts (pygal, leather) do not place
names beside points. Matplotlib is too large a dependency for five pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from dilocox.tools.report.charts import log_ticks, nice_ticks

METHOD_COLOURS = {
    "allreduce": "#444444", "dilocox": "#0a66c2", "dilocox-paper": "#c0392b", "diloco": "#8e6c1f",
    "opendiloco": "#b8860b", "intellect1": "#7a4fa3", "cocktailsgd": "#d35400",
    "sparseloco": "#1e8449",
}  # fmt: skip
"""Colours of the methods that are in several plots."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""
_SIZE, _CHARACTER, _GRID = 11, 5.8, "#e4e4e4"
"""Height and mean width of letters in pixels; colour of the lines at ticks."""


@dataclass(frozen=True)
class Axis:
    """Limits of an axis, how it writes its values, and its name. Logarithmic limits are above 0."""

    low: float
    high: float
    say: Callable[[float], str]
    name: str = ""
    logarithmic: bool = False
    at: Sequence[float] | None = None
    """Values of the ticks. None: round values, or powers of ten."""

    def share(self, value: float) -> float:
        """Return where a value is, from 0 (low) to 1 (high). Values outside are at the limit.
        Raises ValueError if the value is NaN."""
        if math.isnan(value):
            raise ValueError("NaN has no place in a chart: leave the point out")
        low, high = self._even(self.low), self._even(self.high)
        value = self._even(min(self.high, max(self.low, value)))
        return (value - low) / (high - low) if high > low else 0.0

    def ticks(self) -> Sequence[float]:
        """Return the values that have a line and a label."""
        if self.at is not None:
            return self.at
        found = (log_ticks if self.logarithmic else nice_ticks)(self.low, self.high)
        return [value for value in found if self.low <= value <= self.high]

    def _even(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


@dataclass(frozen=True)
class Mark:
    """A point and its name. A point outside of the y axis is a triangle at the edge."""

    x: float
    y: float
    colour: str
    name: str = ""
    hollow: bool = False
    radius: float = 4


@dataclass(frozen=True)
class Curve:
    """Points joined by a line, by rising x. The name stands to the right of the frame."""

    points: Sequence[tuple[float, float]]
    colour: str
    name: str = ""
    width: float = 1.5
    broken: bool = False
    radius: float = 0
    """Radius of the points' dots in pixels; 0 draws none."""
    intervals: Sequence[tuple[float, float, float]] = ()
    """x, lower and upper y."""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar from the left edge, with its name before it and a text after it."""

    name: str
    value: float
    text: str
    colour: str


@dataclass(frozen=True)
class Panel:
    """A chart inside a frame. With bars it has no y axis: the first bar is on top."""

    title: str
    frame: Box
    x: Axis
    y: Axis | None = None
    curves: Sequence[Curve] = ()
    marks: Sequence[Mark] = ()
    bars: Sequence[Bar] = ()

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return a point's pixels from the left and from the top."""
        left, top, right, bottom = self.frame
        height = 0.0 if self.y is None else self.y.share(y)
        return left + self.x.share(x) * (right - left), bottom - height * (bottom - top)


def picture(panels: Sequence[Panel], width: int, height: int, columns: int = 1) -> str:
    """Return an SVG of panels of `width` x `height` pixels, row by row."""
    wide, high = width * columns, height * math.ceil(len(panels) / columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" font-family="Helvetica, Arial, sans-serif" font-size="{_SIZE}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f'<g transform="translate({width * column} {height * row})">')
        parts.append(f'<text x="16" y="22" font-size="14">{escape(panel.title)}</text>')
        parts += [*_axes(panel), *_bars(panel)]
        parts += [part for curve in panel.curves for part in _curve(panel, curve)]
        parts += [_shape(panel, mark) for mark in panel.marks]
        parts += [*_names_of_marks(panel), *_names_of_curves(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#000000") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'


def _axes(panel: Panel) -> list[str]:
    left, top, right, bottom = panel.frame
    name = _text((left + right) / 2, bottom + 36, panel.x.name, "middle")
    parts = [name] if panel.x.name else []
    for value in panel.x.ticks():
        x = left + panel.x.share(value) * (right - left)
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{_GRID}"/>')
        parts.append(_text(x, bottom + 16, panel.x.say(value), "middle"))
    if panel.y is not None:
        for value in panel.y.ticks():
            y = bottom - panel.y.share(value) * (bottom - top)
            parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{_GRID}"/>')
            parts.append(_text(left - 6, y + 4, panel.y.say(value), "end"))
        parts.append(f'<path d="M{left} {top}V{bottom}H{right}" stroke="#444444" fill="none"/>')
    return parts


def _bars(panel: Panel) -> list[str]:
    left, top, _, bottom = panel.frame
    parts = []
    for number, bar in enumerate(panel.bars):
        high = (bottom - top) / len(panel.bars)
        y, (end, _) = top + high * (number + 0.5), panel.place(bar.value, 0.0)
        parts += [
            f'<rect x="{left}" y="{y - 0.3 * high:.1f}" width="{end - left:.1f}" '
            f'height="{0.6 * high:.1f}" fill="{bar.colour}"/>',
            _text(left - 8, y + 4, bar.name, "end"),
            _text(end + 6, y + 4, bar.text),
        ]
    return parts


def _curve(panel: Panel, curve: Curve) -> list[str]:
    joined = " ".join("{:.1f},{:.1f}".format(*panel.place(*point)) for point in curve.points)
    look = f'fill="none" stroke="{curve.colour}" stroke-width="{curve.width}"'
    look += ' stroke-dasharray="4 3"' if curve.broken else ""
    parts = [f'<polyline points="{joined}" {look}/>']
    for x, low, high in curve.intervals:
        (across, down), (_, up) = panel.place(x, low), panel.place(x, high)
        parts.append(f'<path d="M{across:.1f} {down:.1f}V{up:.1f}" stroke="{curve.colour}"/>')
    dots = [Mark(x, y, curve.colour, radius=curve.radius) for x, y in curve.points if curve.radius]
    return parts + [_shape(panel, dot) for dot in dots]


def _shape(panel: Panel, mark: Mark) -> str:
    x, y = panel.place(mark.x, mark.y)
    if panel.y is not None and not panel.y.low <= mark.y <= panel.y.high:
        base, tip = (8, -9) if mark.y > panel.y.high else (-8, 9)
        return f'<path d="M{x - 5:.1f} {y + base:.1f}h10l-5 {tip}z" fill="{mark.colour}"/>'
    look = f'fill="{"#ffffff" if mark.hollow else mark.colour}" stroke="{mark.colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{mark.radius}" {look}/>'


def _names_of_marks(panel: Panel) -> list[str]:
    """Write each name near its mark, where it covers least of marks, curves and other names."""
    points = [panel.place(mark.x, mark.y) for mark in panel.marks]
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    for curve in panel.curves:
        for (x1, y1), (x2, y2) in pairwise(panel.place(*point) for point in curve.points):
            along = [(x1 + n / 50 * (x2 - x1), y1 + n / 50 * (y2 - y1)) for n in range(50)]
            taken += [(x - 1, y - 1, x + 1, y + 1) for x, y in along]
    parts = []
    for mark, (x, y) in zip(panel.marks, points, strict=True):
        wide = _CHARACTER * len(mark.name)
        boxes = [
            (left, y + down - 5, left + wide, y + down + 6)
            for distance in (0, 13, 24, 35)
            for left in (x + 8, x - 8 - wide)
            for down in (distance, -distance)
        ]
        best = min(boxes, key=lambda box: _cost(box, taken, panel.frame) + abs(box[1] + 5 - y))
        taken.append(best)
        at, anchor = (best[0], "start") if best[0] > x else (best[2], "end")
        parts.append(_text(at, best[3] - 2, mark.name, anchor, mark.colour))
    return parts


def _cost(box: Box, taken: Sequence[Box], frame: Box) -> float:
    """Return the area that a name covers, and much more if it leaves the frame far behind."""
    left, top, right, bottom = box
    outside = left < frame[0] or top < frame[1] - 6 or right > frame[2] + 16 or bottom > frame[3]
    across = [(max(0.0, min(right, r) - max(left, x)), y, b) for x, y, r, b in taken]
    return 1e4 * outside + sum(w * max(0.0, min(bottom, b) - max(top, y)) for w, y, b in across)


def _names_of_curves(panel: Panel) -> list[str]:
    """Write the names to the right of the frame, near the curves' ends, without overlaps."""
    ends = [(panel.place(*c.points[-1])[1], c.name, c.colour) for c in panel.curves if c.name]
    parts, free = [], -math.inf
    for y, name, colour in sorted(ends):
        base = max(y + 4, free)
        free = base + _SIZE + 1
        parts.append(_text(panel.frame[2] + 8, base, name, colour=colour))
    return parts
