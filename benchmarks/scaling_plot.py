"""The plot of the scaling simulation: efficiency against the number of sites, as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 46
COLOURS = ("#0a66c2", "#1e8449", "#c0392b", "#d35400", "#7a4fa3", "#8e6c1f")


def picture(points: Sequence[tuple[str, int, float]]) -> str:
    """One line per name through its (name, sites, efficiency), each named at its end."""
    counts = sorted({sites for _, sites, _ in points})
    low, high = math.log2(counts[0]), math.log2(counts[-1])

    def x(sites: int) -> float:
        return LEFT + (math.log2(sites) - low) / max(1e-9, high - low) * (WIDTH - LEFT - RIGHT)

    def y(efficiency: float) -> float:
        return HEIGHT - BOTTOM - min(1.05, efficiency) / 1.05 * (HEIGHT - TOP - BOTTOM)

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Simulated speed over that of the sites alone, '
        "7B on 1 Gbit/s</text>",
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT} {y(share):.1f}H{right}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        )
    for sites in counts:
        parts.append(
            f'<text x="{x(sites):.1f}" y="{bottom + 16}" text-anchor="middle">{sites}</text>'
        )
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#444444" fill="none"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">sites</text>')
    names = list(dict.fromkeys(name for name, _, _ in points))
    taken: list[float] = []
    for name, colour in zip(names, COLOURS, strict=False):
        line = [(sites, share) for own, sites, share in points if own == name]
        path = " ".join(f"{x(sites):.1f},{y(share):.1f}" for sites, share in line)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        parts += [
            f'<circle cx="{x(sites):.1f}" cy="{y(share):.1f}" r="2.6" fill="{colour}"/>'
            for sites, share in line
        ]
        height = y(line[-1][1]) + 4
        while any(abs(height - other) < 12 for other in taken):
            height += 12
        taken.append(height)
        parts.append(
            f'<text x="{right + 8}" y="{height:.1f}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
