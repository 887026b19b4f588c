"""What is made of the exchange's timelines, against numbers worked by hand; a real case, slow."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.exchange import command as exchange
from benchmarks.exchange.command import Round, Setting
from benchmarks.exchange.engine import Turn

from dilocox.tools.testbed import unsupported_reason
from dilocox.tools.testbed.link_spec import Line

TEN = Setting(2, "gather", "none", 1.0, 10, 10)


def test_intervals_that_overlap_count_once() -> None:
    assert exchange.covered([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.6, 0.7)]) == (3.0, 2)
    assert exchange.covered([]) == (0.0, 0)


def test_the_busiest_line_says_how_long_it_takes_at_least() -> None:
    lines = {"a": Line(8e6, 80e6), "b": Line(80e6, 16e6)}
    sent, received = {"a": 1_000_000, "b": 3_000_000}, {"a": 3_000_000, "b": 1_000_000}
    assert exchange.least_seconds(sent, received, lines, 0) == pytest.approx(1.0)
    assert exchange.least_seconds(sent, received, lines, 2) == pytest.approx(0.98)


def trace_of(swaps: list[tuple[float, float]]) -> dict[str, Any]:
    """Two sites that swap 1 MB each in every one of `swaps` (seconds), from zero = 100 s on."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{site} stage 0"}}
        for pid, site in enumerate(("site0", "site1"))
    ]
    for start, end in swaps:
        for pid in (0, 1):
            for name in ("swap", "send", "receive"):
                events.append(
                    {
                        "ph": "X", "name": name, "pid": pid, "ts": start * 1e6,
                        "dur": (end - start) * 1e6, "args": {"bytes": 1_000_000},
                    }
                )  # fmt: skip
    boot = time.time() - time.monotonic()
    return {"traceEvents": events, "otherData": {"zero_unix_us": (boot + 100) * 1e6}}


def turns_of(begun: list[float], ended: list[float]) -> list[Turn]:
    return [
        Turn(site, 0, number, 100 + start, 100 + end, 1_000_000, ())
        for number, (start, end) in enumerate(zip(begun, ended, strict=True))
        for site in ("site0", "site1")
    ]


def test_rounds_are_told_apart_and_the_first_is_left_out() -> None:
    turns = turns_of([0.0, 10.0, 20.0], [5.0, 11.0, 21.0])
    found = exchange.rounds_of(turns, trace_of([(0.1, 4.0), (10.1, 10.9), (20.1, 20.6)]))
    assert [each.seconds for each in found] == pytest.approx([1.0, 1.0])
    assert [each.sent for each in found] == [{"site0": 1_000_000, "site1": 1_000_000}] * 2
    assert found[0].swaps[0] == pytest.approx((110.1, 110.9), abs=1e-3)
    assert [len(each.swaps) for each in found] == [2, 2]
    assert [each.first_stage for each in found] == pytest.approx([1.0, 1.0])


def test_the_first_stage_is_through_when_all_sites_have_its_average() -> None:
    ended = {("site0", 0): 3.0, ("site1", 0): 5.0, ("site0", 1): 4.0, ("site1", 1): 4.5}
    turns = [Turn(site, stage, 1, 0.0, end, 1_000_000, ()) for (site, stage), end in ended.items()]
    assert exchange.first_through(turns) == 4.5


def test_a_row_has_medians_of_the_share_of_the_line() -> None:
    # 1 MB at 10 Mbit/s takes .8 s, less .01 s of burst: .79 of 1, 1.25 and 2 s.
    sent = {"site0": 1_000_000, "site1": 1_000_000}
    rounds = [Round(2.0 * t, [(0.0, t)], sent, sent, 1.5 * t) for t in (1.0, 1.25, 2.0)]
    row = exchange.row(TEN, rounds)
    assert row["efficiency"] == pytest.approx(0.79 / 1.25, abs=1e-4)
    assert row["whole"] == pytest.approx(0.79 / 2.5, abs=1e-4)
    assert row["payloads"] == pytest.approx(1.0, abs=1e-3)
    assert row["first_stage"] == pytest.approx(0.75)
    assert row["link"] == "10"


def test_settings_name_both_congestion_controls_where_they_differ() -> None:
    names = {setting.congestion for setting in exchange.settings(False, "bbr")}
    assert names == {None, exchange.EVEN}
    sites = {setting.sites for setting in exchange.settings(False, "bbr")}
    assert sites == {2, 4, 8}


def test_one_line_and_code_3_where_networks_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["exchange.py", "--quick"])
    monkeypatch.setattr(exchange.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(exchange, "unsupported_reason", lambda: "network namespaces need root")
    assert exchange.main() == 3
    said = capsys.readouterr().err.splitlines()
    assert said == ["exchange: cannot be measured here: network namespaces need root"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(
    unsupported_reason() is not None, reason=f"no namespaces: {unsupported_reason()}"
)
@pytest.mark.parametrize(("sites", "rate"), [(2, 20), (4, 10), (8, 5)])
def test_reduce_sends_what_a_ring_would(sites: int, rate: float, tmp_path: Path) -> None:
    """2 (D - 1) / D payloads per site, within 2 %, and nine tenths of the link, less what a busy
    machine takes.

    Eight sites share two cores with the network between them: at 50 Mbit/s each their processor
    time counts, not their links (docs/notes/transport.md).
    """
    setting = Setting(sites, "reduce", "none", 2.0, rate, rate, congestion=exchange.EVEN)
    row = exchange.measure(setting, 3, tmp_path)
    assert row["payloads"] == pytest.approx(2 * (sites - 1) / sites, rel=0.02)
    assert 0.85 < row["efficiency"] <= 1.0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(
    unsupported_reason() is not None, reason=f"no namespaces: {unsupported_reason()}"
)
def test_no_stage_waits_for_another(tmp_path: Path) -> None:
    """Four of them share a line. Were they served in turn, the first would be through after a
    quarter of the exchange."""
    setting = Setting(2, "gather", "none", 1.0, 50, 50, stages=4, congestion=exchange.EVEN)
    row = exchange.measure(setting, 3, tmp_path)
    assert row["first_stage"] > 0.6
