"""Plots the WAN benchmark as SVG: share of the no-network speed against the slowness of the link.

The SVG is written as plain text, without a library. There is one panel per number of sites, with
two logarithmic axes and a line per method, with intervals where a point was measured several times.
With only one link, each method has a bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.wan.grid import BY_NAME, LIGHT, OURS, SYNCHRONOUS

Row = dict[str, Any]
WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 160, 40, 56
COLOURS = {
    SYNCHRONOUS: "#444444",
    OURS: "#0a66c2",
    LIGHT: "#5b9bd5",
    "dilocox-paper": "#c0392b",
    "diloco": "#8e6c1f",
    "opendiloco": "#b8860b",
    "intellect1": "#7a4fa3",
    "cocktailsgd": "#d35400",
    "sparseloco": "#1e8449",
    "ddp": "#888888",
    "ddp-powersgd": "#b03a8c",
    "torchft-diloco": "#5d8a3a",
    "torchft-streaming": "#2f9e9e",
}
LINE_HEIGHT = 12


def picture(rows: Sequence[Row]) -> str:
    """Return the SVG of all methods and peers of `rows`. References without exchange are the line
    at 100 %."""
    known = [r for r in rows if r["method"] in BY_NAME and r["share_of_no_network"]]
    panels = sorted({row["sites"] for row in known})
    high = HEIGHT * max(1, len(panels))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" '
        f'height="{high}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, sites in enumerate(panels):
        inside = [row for row in known if row["sites"] == sites]
        one_link = len({row["ratio"] for row in inside}) == 1
        parts.append(f'<g transform="translate(0 {HEIGHT * number})">')
        parts += _bars(sites, inside) if one_link else _panel(sites, inside)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """Maps ratios and shares to pixels."""

    def __init__(self, known: Sequence[Row]) -> None:
        ratios = [row["comm_to_compute"] for row in known]
        self.first = math.floor(math.log10(min(ratios)))
        self.last = max(self.first + 1, math.ceil(math.log10(max(ratios))))
        lowest = min(row["share_of_no_network"] for row in known)
        self.low = min(-1, math.floor(math.log10(lowest)))

    def x(self, ratio: float) -> float:
        share = (math.log10(ratio) - self.first) / (self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, share: float) -> float:
        part = math.log10(max(share, 10.0**self.low)) / self.low
        return TOP + part * (HEIGHT - TOP - BOTTOM)


def _panel(sites: int, known: Sequence[Row]) -> list[str]:
    scale = _Scale(known)
    parts = [
        f'<text x="{LEFT}" y="22" font-size="14">Share of the speed without network, {sites} '
        "sites</text>"
    ]
    parts += _axes(scale)
    ends: list[tuple[float, str]] = []
    for method in BY_NAME:
        own = sorted(
            (row for row in known if row["method"] == method), key=lambda r: r["comm_to_compute"]
        )
        if own:
            parts += _line(scale, method, own)
            ends.append((scale.y(own[-1]["share_of_no_network"]), method))
    return parts + _names(ends)


def _bars(sites: int, known: Sequence[Row]) -> list[str]:
    """Draw the methods at one link, the fastest on top, with shares by their logarithm."""
    ratio = known[0]["comm_to_compute"]
    parts = [
        f'<text x="16" y="22" font-size="14">Share of the speed without network, {sites} sites, '
        f"gradients take {ratio:,.0f} steps</text>"
    ]
    lowest = min(row["share_of_no_network"] for row in known)
    low = min(-1, math.floor(math.log10(lowest)))
    left, right, bottom = 2 * LEFT, WIDTH - LEFT, HEIGHT - BOTTOM

    def x(share: float) -> float:
        return right - (right - left) * math.log10(share) / low

    for power in range(low, 1):
        at, name = x(10.0**power), f"{100 * 10.0**power:g} %"
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{name}</text>')
    high = (bottom - TOP) / len(known)
    order = sorted(known, key=lambda row: -row["share_of_no_network"])
    for number, row in enumerate(order):
        share, colour = row["share_of_no_network"], COLOURS[row["method"]]
        name = escape(row["method"])
        y = TOP + high * (number + 0.5)
        end = x(min(share, 1.0))
        parts += [
            f'<rect x="{left}" y="{y - 0.3 * high:.1f}" width="{end - left:.1f}" '
            f'height="{0.6 * high:.1f}" fill="{colour}"/>',
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{name}</text>',
            f'<text x="{end + 6:.1f}" y="{y + 4:.1f}">{100 * share:.3g} %</text>',
        ]
    return parts


def _axes(scale: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for power in range(scale.first, scale.last + 1):
        x = scale.x(10.0**power)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        name = f"{10.0**power:,g}x"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{name}</text>')
    for power in range(scale.low, 1):
        y = scale.y(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
        name = f"{100 * 10.0**power:g} %"
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#444444" fill="none"/>')
    label = "time of a synchronous exchange over an inner step: slower links to the right"
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">{label}</text>')
    return parts


def _line(scale: _Scale, method: str, own: Sequence[Row]) -> list[str]:
    """Draw the points of a method, joined by a line; the line of a peer is broken."""
    colour = COLOURS[method]
    at = [(scale.x(r["comm_to_compute"]), scale.y(r["share_of_no_network"])) for r in own]
    broken = ' stroke-dasharray="4 3"' if BY_NAME[method].kind == "peer" else ""
    wide = 2.5 if BY_NAME[method].adapts else 1.2
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    parts = [
        f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{wide}"{broken}/>'
    ]
    for row, (x, y) in zip(own, at, strict=True):
        low, high = row["share_of_no_network_low"], row["share_of_no_network_high"]
        if low:
            reach = f"M{x:.1f} {scale.y(low):.1f}V{scale.y(high):.1f}"
            parts.append(f'<path d="{reach}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    return parts


def _names(ends: Sequence[tuple[float, str]]) -> list[str]:
    """Draw names to the right of the panel, near the lines' ends, without overlaps."""
    parts, free = [], -math.inf
    for y, method in sorted(ends):
        y = max(y + 4, free)
        free = y + LINE_HEIGHT
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y:.1f}" fill="{COLOURS[method]}">'
            f"{escape(method)}</text>"
        )
    return parts
