"""The plot of the quality benchmark: loss against reduction in all, as an SVG picture.

There is one panel per cell and one mark per point. The points of dilocox are joined, with AdamW
inside and with Muon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks import svg
from benchmarks.quality.report import OURS, Cell, Point, cells, title

WIDTH, HEIGHT = 640, 400
FRAME = (70, 40, WIDTH - 28, HEIGHT - 50)
MUON_COLOUR = "#0b8f8f"
"""Colour of dilocox with Muon inside."""
CLEAR = 1.55
"""Losses above this multiple of the lowest loss are drawn at the upper edge, with their value."""


def picture(known: Sequence[Point]) -> str:
    """Return the SVG of all cells with core points, one panel below the other."""
    known = [point for point in known if point.group != "ablations"]
    panels = cells(point for point in known if point.group == "core")
    parts = [_panel(where, [p for p in known if p.cell == where]) for where in panels]
    return svg.picture(parts, WIDTH, HEIGHT)


def _panel(where: Cell, known: Sequence[Point]) -> svg.Panel:
    losses = [p.loss for p in known if p.loss is not None] or [1.0]
    low = min(losses)
    high = max(loss for loss in losses if loss <= low * CLEAR)
    room = max(high - low, 0.02 * low)
    y = svg.Axis(low - 0.1 * room, high + 0.12 * room, "{:.3f}".format)
    decades = max(1, math.ceil(math.log10(max(p.reduction for p in known))))
    label = "times fewer bytes between sites than synchronous training, in all"
    x = svg.Axis(0.8, 10.0**decades, "{:,.0f}x".format, label, logarithmic=True)
    curves = []
    for group in ("core", "muon"):
        ours = [p for p in known if (p.method, p.group) == (OURS, group) and p.loss is not None]
        if ours:
            points = sorted((p.reduction, p.loss or 0.0) for p in ours)
            curves.append(svg.Curve(points, _colour(ours[0])))
    order = sorted(known, key=lambda p: (p.loss is None, -(p.loss or 0.0)))
    marks = [_mark(point, y.high) for point in order]
    return svg.Panel(f"Held-out loss, {title(where)}", FRAME, x, y, curves, marks)


def _mark(point: Point, most: float) -> svg.Mark:
    loss, name = point.loss, point.label
    if loss is None or loss > most:
        name += " diverged" if loss is None else f" {loss:.2f}"
    published = point.label.endswith("published")
    y = math.inf if loss is None else loss
    return svg.Mark(point.reduction, y, _colour(point), name, hollow=published)


def _colour(point: Point) -> str:
    muon = point.method == OURS and point.group == "muon"
    return MUON_COLOUR if muon else svg.METHOD_COLOURS.get(point.method, "#888888")
