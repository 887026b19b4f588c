"""Plots the scaling simulation as an SVG picture: speed, and the loss that it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import svg

COLOURS = ("#0a66c2", "#1e8449", "#c0392b", "#d35400", "#7a4fa3", "#8e6c1f", "#2c3e50")


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of two panels: efficiency and predicted loss over the number of sites."""
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    counts = sorted({row["sites"] for row in rows})
    x = svg.Axis(counts[0], counts[-1], "{:.0f}".format, "sites", logarithmic=True, at=counts)
    speed = svg.Axis(0.0, 1.0, "{:.0%}".format, at=(0.0, 0.25, 0.5, 0.75, 1.0))
    worst = max(0.1, math.ceil(10 * max(row["loss"] for row in rows)) / 10)
    loss = svg.Axis(0.0, worst, "{:+.0%}".format)

    def panel(title: str, y: svg.Axis, key: str) -> svg.Panel:
        curves = []
        for name, colour in zip(names, COLOURS, strict=False):
            points = [(row["sites"], row[key]) for row in rows if row["scenario"] == name]
            curves.append(svg.Curve(points, colour, name, width=1.8, radius=2.6))
        return svg.Panel(title, (56, 40, 330, 294), x, y, curves)

    panels = [
        panel("Speed over that of the sites alone", speed, "efficiency"),
        panel("Predicted loss over synchronous", loss, "loss"),
    ]
    return svg.picture(panels, 450, 340, columns=2)
