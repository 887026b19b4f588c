"""The schedule of faults and what is made of a run's records, against numbers worked by hand."""

from __future__ import annotations

import sys
from typing import Any

import chaos
import pytest
from chaos import Blow


def test_every_kind_comes_once_before_any_comes_again() -> None:
    found = chaos.schedule(7, 2 * len(chaos.KINDS) + 1)
    first, second = found[: len(chaos.KINDS)], found[len(chaos.KINDS) : -1]
    assert {kind for kind, _ in first} == {kind for kind, _ in second} == set(chaos.KINDS)
    assert found == chaos.schedule(7, len(found))
    assert found != chaos.schedule(8, len(found))
    assert dict(found)["coordinator-kill"] == chaos.HUB
    assert dict(found)["disk-full"] == chaos.SMALL_DISK


def report(site: str | None, number: int, time: float) -> dict[str, Any]:
    return {"kind": "round", "site": site, "round": number, "time": time}


def test_a_round_counts_when_the_first_survivor_reports_it() -> None:
    records = [
        report("lyon", 0, 1.0), report("paris", 0, 1.2), report(None, 0, 1.2),
        report("lyon", 1, 1.9), report("paris", 1, 2.5),
        report("oslo", 2, 3.4), report("paris", 2, 3.5),
        {"kind": "message", "time": 3.6},
    ]  # fmt: skip
    assert chaos.round_times(records, "lyon") == [1.2, 2.5, 3.4]
    assert chaos.round_times(records, chaos.HUB) == [1.0, 1.9, 3.4]


def test_a_stall_is_the_longest_gap_near_the_fault_less_the_usual_one() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 9.0, 10.0, 11.0, 31.0, 32.0]
    assert chaos.stall(Blow("rank-kill", "lyon", 3.5, 10.5), times) == pytest.approx(5.0)
    assert chaos.stall(Blow("rank-kill", "lyon", 0.2, 2.5), times) == 0.0


def test_rows_have_medians_and_the_worst() -> None:
    records = [report("paris", number, float(number)) for number in range(4)]
    records += [report("paris", 4 + number, 8.0 + number) for number in range(8)]
    blows = [Blow("rank-kill", "lyon", 3.1, 9.1), Blow("rank-kill", "lyon", 12.1, 14.1)]
    (row,) = chaos.rows_of(blows, records)
    assert row == {
        "fault": "rank-kill", "count": 2, "stall_seconds": 2.0, "stall_worst": 4.0,
        "recovery_seconds": 4.0, "recovery_worst": 6.0,
    }  # fmt: skip


def test_the_run_as_a_whole() -> None:
    summary = {
        "phase": "finished", "rounds": 90, "sequences_doubled": 0, "sequences_missing": 0,
        "val_loss_last": 2.02,
    }  # fmt: skip
    ledger = [
        {"site": "lyon", "round": 4, "state": "returned"},
        {"site": "lyon", "round": 4, "state": "returned"},
        {"site": "oslo", "round": 4, "state": "returned"},
        {"site": "oslo", "round": 5, "state": "committed"},
    ]
    row = chaos.whole(summary, ledger, 2.0, 9)
    assert row["discarded"] == 2
    assert row["loss_ratio"] == pytest.approx(1.01)
    assert (row["diverged"], row["hangs"], row["count"]) == (0, 0, 9)


def test_one_line_and_code_3_where_networks_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--quick"])
    monkeypatch.setattr(chaos.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(chaos, "why_not", lambda: "network namespaces need root")
    assert chaos.main() == 3
    said = capsys.readouterr().err.splitlines()
    assert said == ["chaos: cannot be measured here: network namespaces need root"]
