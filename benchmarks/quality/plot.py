"""The plot of the quality benchmark: loss against reduction in all, as an SVG picture.

Plain text, no library: one panel per cell, one mark per point, the points of dilocox joined, with
AdamW inside and with Muon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.quality.report import OURS, Cell, Point, cells, title

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 28, 40, 50
COLOURS = {
    "allreduce": "#444444",
    "dilocox": "#0a66c2",
    "dilocox-paper": "#c0392b",
    "diloco": "#8e6c1f",
    "opendiloco": "#b8860b",
    "intellect1": "#7a4fa3",
    "cocktailsgd": "#d35400",
    "sparseloco": "#1e8449",
}
OTHER = "#888888"
MUON_COLOUR = "#0b8f8f"
"""Colour of dilocox with Muon inside."""
CLEAR = 1.55
"""Losses above this multiple of the lowest loss are drawn at the upper edge, with their value."""


def picture(known: Sequence[Point]) -> str:
    """Return the SVG of all cells with core points, one panel below the other."""
    known = [point for point in known if point.group != "ablations"]
    panels = cells(point for point in known if point.group == "core")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}" '
        f'width="{WIDTH}" height="{HEIGHT * len(panels)}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, where in enumerate(panels):
        inside = [p for p in known if p.cell == where]
        parts.append(f'<g transform="translate(0 {HEIGHT * number})">')
        parts += _panel(where, inside)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """Maps values to pixels, with a margin: the reduction by its logarithm, the loss linearly."""

    def __init__(self, known: Sequence[Point]) -> None:
        losses = [p.loss for p in known if p.loss is not None] or [1.0]
        low = min(losses)
        high = max(loss for loss in losses if loss <= low * CLEAR)
        room = max(high - low, 0.02 * low)
        self.low, self.high = low - 0.1 * room, high + 0.12 * room
        self.decades = max(1, math.ceil(math.log10(max(p.reduction for p in known))))

    def x(self, reduction: float) -> float:
        """Return pixels from the left; 0.8 is at the edge."""
        start = math.log10(0.8)
        share = (math.log10(max(reduction, 0.8)) - start) / (self.decades - start)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        """Return pixels from the top; a loss that is too high or None is at the upper edge."""
        share = min(1.0, (loss - self.low) / (self.high - self.low))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _panel(where: Cell, known: Sequence[Point]) -> list[str]:
    scale = _Scale(known)
    parts = [f'<text x="{LEFT}" y="22" font-size="14">Held-out loss, {title(where)}</text>']
    parts += _axes(scale)
    for group in ("core", "muon"):
        ours = [p for p in known if (p.method, p.group) == (OURS, group) and p.loss is not None]
        if ours:
            parts.append(_joined(scale, ours))
    taken = [(x - 5, x + 5, y + 4) for x, y in (_place(scale, point) for point in known)]
    for point in sorted(known, key=lambda p: (p.loss is None, -(p.loss or 0.0))):
        parts += _mark(scale, point, taken)
    return parts


def _joined(scale: _Scale, ours: list[Point]) -> str:
    ours.sort(key=lambda point: point.reduction)
    line = " ".join("{:.1f},{:.1f}".format(*_place(scale, point)) for point in ours)
    return f'<polyline points="{line}" fill="none" stroke="{_colour(ours[0])}" stroke-width="1.5"/>'


def _colour(point: Point) -> str:
    muon = point.method == OURS and point.group == "muon"
    return MUON_COLOUR if muon else COLOURS.get(point.method, OTHER)


def _axes(scale: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for power in range(scale.decades + 1):
        x = scale.x(10.0**power)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{10**power:,}x</text>'
        )
    for loss in _ticks(scale.low, scale.high):
        y = scale.y(loss)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#444444" fill="none"/>')
    middle = (LEFT + right) / 2
    label = "times fewer bytes between sites than synchronous training, in all"
    parts.append(f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{label}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return four to ten round values between two limits."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _place(scale: _Scale, point: Point) -> tuple[float, float]:
    return scale.x(point.reduction), scale.y(math.inf if point.loss is None else point.loss)


def _mark(scale: _Scale, point: Point, taken: list[tuple[float, float, float]]) -> list[str]:
    """Return a mark and its name. `taken`: left, right and base of all marks and earlier names."""
    colour = _colour(point)
    above = point.loss is None or point.loss > scale.high
    x, y = _place(scale, point)
    name = point.label
    if above:
        name += " diverged" if point.loss is None else f" {point.loss:.2f}"
        shape = f'<path d="M{x - 5:.1f} {y + 8:.1f}h10l-5 -9z" fill="{colour}"/>'
    else:
        hollow = "#ffffff" if point.label.endswith("published") else colour
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{hollow}" stroke="{colour}"/>'
    wide = 6.0 * len(name)
    to_left = x + 8 + wide > WIDTH - RIGHT
    left = x - 8 - wide if to_left else x + 8
    height = y + (16 if point.method == OURS and not to_left else 4)  # off the line
    while any(
        abs(height - b) < 11 and left < end and start < left + wide for start, end, b in taken
    ):
        height += 11
    taken.append((left, left + wide, height))
    anchor, at = ("end", x - 8) if to_left else ("start", x + 8)
    return [
        shape,
        f'<text x="{at:.1f}" y="{height:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(name)}</text>",
    ]
