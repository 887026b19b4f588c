"""What is made of a timeline, against numbers worked by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import outer_cost
from dilocox.coordinator.metrics.run_metrics import CHOSEN


def span(name: str, at: float, spent: float, pid: int = 1) -> dict[str, Any]:
    """A span at `at` ms that computed `spent` ms."""
    return {"ph": "X", "name": name, "pid": pid, "ts": at * 1e3, "dur": 1e6, "tdur": spent * 1e3}


def mark(number: int, at: float, pid: int = 1) -> dict[str, Any]:
    return {"ph": "i", "name": f"round {number}", "pid": pid, "ts": at * 1e3}


def trace(rounds: int, pids: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    """Rounds of 100 ms: 80 of inner steps, 5 of an exchange (2 encode, 1 decode), 3 elsewhere."""
    events = []
    for pid in pids:
        for number in range(rounds + 1):
            at = 100.0 * number
            events += [
                mark(number, at, pid),
                span("inner step", at + 1, 40, pid),
                span("inner step", at + 2, 40, pid),
                span("forward and backward", at + 2, 39, pid),
                span("exchange", at + 3, 5, pid),
                span("encode", at + 3, 2, pid),
                span("decode and average", at + 4, 1, pid),
                span("landing", at + 5, 1.5, pid),
                span("outer step", at + 5, 1, pid),
                span("send", at + 6, 0.5, pid),
                span("account", at + 7, 1, pid),
            ]
    return {"traceEvents": events}


def test_spans_count_once_and_the_last_round_not_at_all() -> None:
    found = outer_cost.rounds_of(trace(3, (1,)))
    assert sorted(found) == [(1, 0), (1, 1), (1, 2)]
    assert dict(found[1, 1]) == pytest.approx(
        {"inner": 80, "encode": 2, "decode": 1, "boundaries": 1.5, "transfer": 0.5, "rest": 3}
    )


def test_a_row_has_the_share_of_the_settled_rounds() -> None:
    # The keys that a run writes, no others.
    first: dict[str, Any] = {"kind": "plan", "round": 0, **dict.fromkeys(CHOSEN)}
    first |= {"codec": "int4", "inner_steps": 2, "delay": 1}
    last = {**first, "round": outer_cost.SETTLED + 2, "inner_steps": 1}
    parameters = 2 * outer_cost.BATCH * outer_cost.LENGTH * 10
    reported = [
        {"kind": "round", "round": number, "exchange_work_seconds": number / 1000}
        for number in (0, outer_cost.SETTLED, outer_cost.SETTLED + 1, outer_cost.SETTLED + 2)
    ]
    plans = [first, last, *reported]
    row = outer_cost.row("5mbit", plans, trace(outer_cost.SETTLED + 3), parameters, 17, 4)
    assert row["inner_steps"] == 2
    assert row["outer_ms"] == pytest.approx(8.0)
    assert row["share"] == pytest.approx(0.1)
    assert row["counted_ms"] == pytest.approx(outer_cost.SETTLED + 0.5)
    assert row["rounds"] == 2
    assert row["tokens_per_parameter"] == pytest.approx(0.1)


def test_too_short_a_run_is_said() -> None:
    with pytest.raises(ValueError, match="more steps"):
        outer_cost.row("5mbit", [], trace(outer_cost.SETTLED), 1, 17, 4)


@pytest.mark.parametrize(
    "failure",
    [
        ValueError("5mbit: no round after the first 4; give it more steps"),
        RuntimeError("5mbit: training failed"),
    ],
)
def test_links_measured_before_a_failure_are_kept(
    failure: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(_root: Path, link: str, _steps: int) -> dict[str, Any]:
        if link == "5mbit":
            raise failure
        return {"link": link}

    file = tmp_path / "found.json"
    monkeypatch.setattr(outer_cost, "measure", measure)
    monkeypatch.setattr(outer_cost.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(sys, "argv", ["outer_cost.py", "--quick", "--json", str(file)])
    assert outer_cost.main() == 1
    assert json.loads(file.read_text())["rows"] == [{"link": "100mbit"}]
    assert "outer_cost: 5mbit: " in capsys.readouterr().err


def test_a_run_that_does_not_end_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(outer_cost.subprocess, "run", late)
    with pytest.raises(RuntimeError, match="5mbit: training has not ended after 900 s"):
        outer_cost.measure(tmp_path, "5mbit", 8)
