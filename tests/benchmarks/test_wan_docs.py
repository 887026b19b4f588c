"""Tables and bars of the WAN benchmark, from rows by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.wan import docs as wan_docs
from benchmarks.wan import plot as wan_plot
from benchmarks.wan.grid import NONE

TEXT = """\
a
<!-- wan: begin 2 400 -->
old
<!-- wan: end -->
b
<!-- wan: begin 4 400 -->
<!-- wan: end -->
"""


def row(method: str, speed: float, share: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "sites": 2, "ratio": 400, "link": "1.2 Mbit/s", "round_trip_ms": 0.3,
        "step_ms": 50.4, "comm_to_compute": 416.2,
        "tokens_per_second": speed, "share_of_no_network": share,
        "share_of_no_network_low": None, "share_of_no_network_high": None,
        "speedup_vs_allreduce": speed / 50, "inner_steps": 1.0, "payload_bytes": 3_678_784,
        "wire_bytes": 3_849_276, "efficiency": 0.948, "congestion": "cubic", "blocks": 1, **more,
    }  # fmt: skip


ROWS = [
    row(NONE, 20_000.0, 1.0, payload_bytes=None, efficiency=None),
    row("allreduce", 50.0, 0.0025),
    row("dilocox", 19_600.0, 0.98, share_of_no_network_low=0.961, share_of_no_network_high=0.99,
        payload_bytes=70_344, inner_steps=50.0),
    row("ddp", 49.0, 0.002),
]  # fmt: skip


def test_tables_are_filled_between_their_marks() -> None:
    filled = wan_docs.filled(TEXT, ROWS)
    assert filled.startswith(
        "a\n<!-- wan: begin 2 400 -->\n2 sites with 1.2 Mbit/s each. Round trips take 0.30 ms and a"
    )
    assert "416 times as long as a step. TCP uses `cubic`. A figure is one measurement.\n" in filled
    twice = [*ROWS, row("diloco", 9_000.0, 0.45, blocks=2)]
    several = "one measurement, with an interval the median of several.\n"
    assert several in wan_docs.filled(TEXT, twice)
    assert "| no exchange | 20,000 |  | 400x |  |  |  |  |\n" in filled
    assert "| allreduce | 50.0 | 0.25% | 1x | 1 | 3.68 MB | 3.85 MB | 95% |\n" in filled
    assert "| dilocox | 19,600 | 98.0% (96.1% to 99.0%) | 392x | 50 | 70.3 kB |" in filled
    assert "| ddp (peer) |" in filled
    assert "old" not in filled
    assert "<!-- wan: begin 4 400 -->\nNot measured yet.\n<!-- wan: end -->\n" in filled
    assert wan_docs.filled(filled, ROWS) == filled


def test_tables_of_links_without_rows_are_kept() -> None:
    """A quick run, or one that had failed at its start, emptied the tables of other links."""
    assert wan_docs.filled(TEXT, []) == TEXT.replace(
        "<!-- wan: begin 4 400 -->\n", "<!-- wan: begin 4 400 -->\nNot measured yet.\n"
    )


def test_one_link_is_drawn_as_bars_and_several_as_lines() -> None:
    bars = wan_plot.picture(ROWS)
    # The background, and a bar for each method; the reference is the line at 100 %.
    assert bars.count("<rect") == 1 + 3
    assert ">0.25 %<" in bars
    assert bars.index(">dilocox<") < bars.index(">allreduce<")
    slower = [{**each, "ratio": 4000, "comm_to_compute": 4162.0} for each in ROWS]
    lines = wan_plot.picture([*ROWS, *slower])
    assert lines.count("<polyline") == 3
