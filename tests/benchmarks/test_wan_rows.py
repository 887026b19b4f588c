"""Medians, paired shares, speed-ups and verdicts, against numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.wan import plot as wan_plot
from benchmarks.wan import rows as wan_rows
from benchmarks.wan.grid import ALONE, NONE, OURS, synchronous_bits

PARAMETERS = 1_000_000


def run(method: str, block: int, speed: float, ratio: int = 400, **more: Any) -> dict[str, Any]:
    return {
        "sites": 2,
        "ratio": ratio,
        "method": method,
        "block": block,
        "link_asked_bits_per_second": 1.6e6,
        "link_bits_per_second": 1.59e6,
        "round_trip_ms": 0.4,
        "congestion": "cubic",
        "date": f"2026-11-0{block + 1}",
        "tokens_per_second": speed,
        "seconds": 20.0,
        "steps": 10,
        "inner_steps": 1.0,
        "payload_bytes": 1000,
        **more,
    }


RUNS = [
    run(NONE, 0, 20_000.0),
    run(OURS, 0, 19_600.0, payload_bytes=1000.4, efficiency=0.92, plan="int4 H=80", reason="why"),
    run("allreduce", 0, 50.0),
    run("ddp", 0, 51.0),
    run(ALONE, 0, 25_500.0),
    run(NONE, 1, 10_000.0),
    run(OURS, 1, 9_900.0, payload_bytes=1002.4, efficiency=0.94, plan="int4 H=80", reason="why"),
    run(NONE, 2, 20_000.0),
    run(OURS, 2, 19_000.0, payload_bytes=1004.4, efficiency=0.93, plan="int4 H=80", reason="why"),
]


def row(method: str) -> dict[str, Any]:
    return next(r for r in wan_rows.rows(RUNS, PARAMETERS) if r["method"] == method)


def test_shares_are_paired_within_blocks() -> None:
    # 0.98, 0.99 and 0.95 of their own blocks; 19,000 over the median 20,000 would be the same
    # share for two of them, and the second block's machine was half as fast.
    ours = row(OURS)
    assert ours["share_of_no_network"] == pytest.approx(0.98)
    assert ours["share_of_no_network_low"] == pytest.approx(0.95)
    assert ours["share_of_no_network_high"] == pytest.approx(0.99)
    assert ours["blocks"] == 3
    assert ours["payload_bytes"] == 1002
    assert ours["efficiency"] == pytest.approx(0.93)
    assert (ours["round_trip_ms"], ours["congestion"]) == (0.4, "cubic")
    assert ours["dates"] == "2026-11-01, 2026-11-02, 2026-11-03"


def test_speedups_are_over_allreduce_and_peers_have_their_own_reference() -> None:
    assert row(OURS)["speedup_vs_allreduce"] == pytest.approx(19_000 / 50)
    assert row("allreduce")["share_of_no_network"] == pytest.approx(0.0025)
    assert row("allreduce")["share_of_no_network_low"] is None
    peer = row("ddp")
    assert peer["share_of_no_network"] == pytest.approx(51 / 25_500)
    assert peer["speedup_vs_allreduce"] == pytest.approx(1.02)


def test_what_a_peer_takes_beyond_its_own_loops_steps_is_its_exchange() -> None:
    """Not beyond the engine's steps, which are others: here they would leave no time at all."""
    # 20 s less ten steps of 0.4 s: five payloads of 800 kB in 16 s are 2 of 2.5 Mbit/s.
    spent = {"seconds": 20.0, "steps": 10, "inner_steps": 2.0, "payload_bytes": 8e5}
    own = {**run("ddp", 0, 50.0, **spent), "link_bits_per_second": 2.5e6}
    assert wan_rows.peer_efficiency(own, 0.4) == pytest.approx(0.8)
    assert wan_rows.peer_efficiency(own, 2.0) is None
    streaming = {**own, "method": "torchft-streaming"}
    known = [run(NONE, 0, wan_rows.TOKENS / 2.0), own, streaming]
    for runs, expected in ((known, None), ([*known, run(ALONE, 0, wan_rows.TOKENS / 0.4)], 0.8)):
        found = {r["method"]: r["efficiency"] for r in wan_rows.rows(runs, PARAMETERS)}
        assert found["ddp"] == expected
        assert found["torchft-streaming"] is None


def test_the_ratio_is_that_of_the_measured_link_and_step() -> None:
    # 1,024 tokens at 20,000 a second; the link moves 1.59 Mbit/s.
    step = wan_rows.TOKENS / 20_000
    expected = synchronous_bits(PARAMETERS, 2) / 1.59e6 / step
    assert row(OURS)["comm_to_compute"] == pytest.approx(expected, abs=0.05)
    assert row(OURS)["link"] == "1.6 Mbit/s"


def test_a_link_without_its_reference_has_no_rows() -> None:
    assert wan_rows.rows([run(OURS, 0, 1.0)], PARAMETERS) == []


def test_verdicts_say_what_was_met_and_what_was_missed() -> None:
    said = wan_rows.verdicts(wan_rows.rows(RUNS, PARAMETERS))
    assert len(said) == 5
    assert "keeps 0.25% of the no-network speed, which meets at most 0.3%" in said[0]
    assert "keeps 98.0%, which meets 97% or more" in said[1]
    assert "lower bound is 95.0%, which meets 95%" in said[2]
    assert "380 times allreduce, which meets 323" in said[3]
    assert said[4].endswith("int4 H=80: why")
    slower = [{**r, "tokens_per_second": 9_000.0} if r["method"] == OURS else r for r in RUNS]
    missed = wan_rows.verdicts(wan_rows.rows(slower, PARAMETERS))
    assert "which MISSES 97%" in missed[1]
    assert "180 times allreduce, which MISSES 323" in missed[3]


def test_the_table_and_the_picture_have_every_method() -> None:
    known = wan_rows.rows(RUNS, PARAMETERS)
    text, picture = wan_rows.table(known), wan_plot.picture(known)
    for method in (OURS, "allreduce", "ddp"):
        assert method in text
        assert f">{method}</text>" in picture
    assert picture.count("<svg") == picture.count("</svg>") == 1
    # References are the line at 100 %, not points.
    assert f">{NONE}</text>" not in picture


def test_slower_links_stand_to_the_right_and_lower_shares_lower() -> None:
    none = {"method": OURS, "share_of_no_network_low": None, "share_of_no_network_high": None}
    rows = [
        {"comm_to_compute": 40.0, "share_of_no_network": 0.025, **none},
        {"comm_to_compute": 4000.0, "share_of_no_network": 0.00025, **none},
    ]
    panel = wan_plot._lines(2, rows)
    left, top, right, bottom = panel.frame
    (x1, y1), (x2, y2) = panel.place(40.0, 0.025), panel.place(4000.0, 0.00025)
    assert left <= x1 < x2 <= right
    assert panel.place(40.0, 1.0)[1] == top < y1 < y2 <= bottom


def test_a_share_above_100_percent_is_drawn_above_the_line_of_100_percent() -> None:
    rows = [{**each, "share_of_no_network": 1.2} for each in wan_rows.rows(RUNS, PARAMETERS)]
    panel = wan_plot._lines(2, rows)
    assert panel.y is not None
    assert panel.y.high >= 1.2
    assert panel.y.ticks()[-1] == 1.0
