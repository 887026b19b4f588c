"""Plots the WAN benchmark as SVG: share of the no-network speed against the slowness of the link.

There is one panel per number of sites, with two logarithmic axes and a line per method, with
intervals where a point was measured several times. With only one link, each method has a bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import svg
from benchmarks.wan.grid import BY_NAME, LIGHT
from dilocox.tools.report.charts import log_ticks

Row = dict[str, Any]
WIDTH, HEIGHT, TOP, BOTTOM = 720, 440, 40, 384
COLOURS = svg.METHOD_COLOURS | {
    LIGHT: "#5b9bd5", "ddp": "#888888", "ddp-powersgd": "#b03a8c", "torchft-diloco": "#5d8a3a",
    "torchft-streaming": "#2f9e9e",
}  # fmt: skip


def picture(rows: Sequence[Row]) -> str:
    """Return the SVG of all methods and peers of `rows`. References without exchange are the line
    at 100 %."""
    known = [r for r in rows if r["method"] in BY_NAME and r["share_of_no_network"]]
    panels = []
    for sites in sorted({row["sites"] for row in known}):
        inside = [row for row in known if row["sites"] == sites]
        one_link = len({row["ratio"] for row in inside}) == 1
        panels.append(_bars(sites, inside) if one_link else _lines(sites, inside))
    return svg.picture(panels, WIDTH, HEIGHT)


def _lines(sites: int, known: Sequence[Row]) -> svg.Panel:
    """Return the panel of several links."""
    ratios = [row["comm_to_compute"] for row in known]
    decades = log_ticks(min(ratios), max(ratios))
    label = "time of a synchronous exchange over an inner step: slower links to the right"
    x = svg.Axis(decades[0], decades[-1], "{:,g}x".format, label, logarithmic=True)
    known = sorted(known, key=lambda row: row["comm_to_compute"])
    own = {method: [row for row in known if row["method"] == method] for method in BY_NAME}
    curves = [_line(method, rows) for method, rows in own.items() if rows]
    title, frame = f"Share of the speed without network, {sites} sites", (64, TOP, 560, BOTTOM)
    return svg.Panel(title, frame, x, _shares(known), curves)


def _line(method: str, own: Sequence[Row]) -> svg.Curve:
    """Return the points of a method, joined by a line; the line of a peer is broken."""
    return svg.Curve(
        [(row["comm_to_compute"], row["share_of_no_network"]) for row in own],
        COLOURS[method],
        method,
        width=2.5 if BY_NAME[method].adapts else 1.2,
        broken=BY_NAME[method].kind == "peer",
        radius=3,
        intervals=[
            (r["comm_to_compute"], r["share_of_no_network_low"], r["share_of_no_network_high"])
            for r in own
            if r["share_of_no_network_low"]
        ],
    )


def _bars(sites: int, known: Sequence[Row]) -> svg.Panel:
    """Return the methods at one link, the fastest on top, with shares by their logarithm."""
    order = sorted(known, key=lambda row: -row["share_of_no_network"])
    bars = [
        svg.Bar(name, share, f"{100 * share:.3g} %", COLOURS[name])
        for name, share in ((row["method"], row["share_of_no_network"]) for row in order)
    ]
    title = f"Share of the speed without network, {sites} sites, gradients take "
    title += f"{known[0]['comm_to_compute']:,.0f} steps"
    return svg.Panel(title, (128, TOP, 656, BOTTOM), _shares(known), bars=bars)


def _shares(known: Sequence[Row]) -> svg.Axis:
    """Return the axis of shares: whole decades up to 100 %, or to the largest share above it."""
    shares = [row["share_of_no_network"] for row in known]
    ends = [row["share_of_no_network_high"] or 0.0 for row in known]
    low = 10.0 ** min(-1, math.floor(math.log10(min(shares))))
    high = max(1.0, *shares, *ends)
    return svg.Axis(low, high, lambda share: f"{100 * share:g} %", logarithmic=True)
