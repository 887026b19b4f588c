"""Plots the scaling simulation as an SVG picture: speed, and the loss that it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 900, 340
PANEL, LEFT, TOP, BOTTOM = 330, 56, 40, 46
LEGEND = 730
COLOURS = ("#0a66c2", "#1e8449", "#c0392b", "#d35400", "#7a4fa3", "#8e6c1f", "#2c3e50")
Point = tuple[str, int, float, float]
"""Name of the line, sites, efficiency, predicted loss."""


def picture(points: Sequence[Point]) -> str:
    """Return an SVG of two panels: efficiency and predicted loss over the number of sites."""
    names = list(dict.fromkeys(name for name, *_ in points))
    worst = max(0.1, math.ceil(10 * max(loss for *_, loss in points)) / 10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *_panel(0, "Speed over that of the sites alone", 1.0, "{:.0%}", points, lambda p: p[2]),
        *_panel(1, "Predicted loss over synchronous", worst, "{:+.0%}", points, lambda p: p[3]),
    ]
    for number, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        y = TOP + 16 + 20 * number
        parts.append(f'<path d="M{LEGEND} {y - 4}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEGEND + 24}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    place: int,
    title: str,
    most: float,
    form: str,
    points: Sequence[Point],
    value: Callable[[Point], float],
) -> list[str]:
    counts = sorted({point[1] for point in points})
    low, high = math.log2(counts[0]), math.log2(counts[-1])
    begin = LEFT + place * (PANEL + 16)
    end, bottom = begin + PANEL - LEFT, HEIGHT - BOTTOM

    def x(sites: int) -> float:
        return begin + (math.log2(sites) - low) / max(1e-9, high - low) * (end - begin)

    def y(share: float) -> float:
        return bottom - min(1.0, share / most) * (bottom - TOP)

    parts = [f'<text x="{begin}" y="24" font-size="13">{escape(title)}</text>']
    for step in range(5):
        share = most * step / 4
        parts.append(f'<path d="M{begin} {y(share):.1f}H{end}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{begin - 6}" y="{y(share) + 4:.1f}" text-anchor="end">'
            f"{form.format(share)}</text>"
        )
    for sites in counts:
        parts.append(
            f'<text x="{x(sites):.1f}" y="{bottom + 16}" text-anchor="middle">{sites}</text>'
        )
    middle = (begin + end) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">sites</text>')
    parts.append(f'<path d="M{begin} {TOP}V{bottom}H{end}" stroke="#444444" fill="none"/>')
    names = list(dict.fromkeys(name for name, *_ in points))
    for name, colour in zip(names, COLOURS, strict=False):
        line = [(point[1], value(point)) for point in points if point[0] == name]
        path = " ".join(f"{x(sites):.1f},{y(share):.1f}" for sites, share in line)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        parts += [
            f'<circle cx="{x(sites):.1f}" cy="{y(share):.1f}" r="2.6" fill="{colour}"/>'
            for sites, share in line
        ]
    return parts
