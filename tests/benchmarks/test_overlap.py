"""What is made of a run's records, and what happens where nothing can be measured."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from benchmarks import overlap


def records(seconds: float, wait: float, exchange: float, rounds: int) -> list[dict[str, Any]]:
    return [
        {
            "site": site,
            "round": number,
            "time": 100.0 + seconds * number,
            "tokens": 1000,
            "wait_seconds": 50.0 if number < overlap.WARM_UP_ROUNDS else wait,
            "exchange_seconds": 90.0 if number < overlap.WARM_UP_ROUNDS else exchange,
            "payload_bytes": 77,
        }
        for number in range(rounds)
        for site in overlap.SITES
    ]


def test_course_leaves_the_first_rounds_out_and_goes_by_the_wall_clock() -> None:
    course = overlap.course(records(seconds=2.0, wait=0.25, exchange=1.0, rounds=6))
    assert course.round_seconds == pytest.approx(2.0)
    assert course.tokens_per_second == pytest.approx(2 * 1000 / 2.0)
    assert course.exchange_seconds == pytest.approx(1.0)
    assert course.hidden_share == pytest.approx(0.75)
    assert course.payload_bytes == 77


def test_rows_are_medians_against_the_sites_alone() -> None:
    alone = overlap.Course(1.0, 0.01, 0.0, 2000.0, 0)
    runs = [overlap.Course(1.0 + x, 0.5, x, 2000.0 / (1 + x), 10) for x in (0.1, 0.25, 0.9)]
    row = overlap.row(overlap.NONE, runs, alone)
    assert row["ratio"] == pytest.approx(0.8)
    assert row["hidden_share"] == pytest.approx(0.5)
    assert row["wait_share"] == pytest.approx(0.2)


def test_the_sites_alone_are_their_own_reference() -> None:
    """The first repetition was, and rules were compared with another one, the median."""
    alone = [overlap.Course(1.0, 0.01, 0.0, speed, 0) for speed in (2400.0, 1000.0, 2000.0)]
    keep = [overlap.Course(1.0, 0.5, 0.1, 1500.0, 10)]
    first, second = overlap.rows_of(alone, {overlap.KEEP_SHORT: keep})
    assert (first["overlap"], first["tokens_per_second"], first["ratio"]) == ("alone", 2000.0, 1.0)
    assert (second["overlap"], second["ratio"]) == ("keep", 0.75)


def test_one_line_and_code_3_where_networks_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--quick"])
    monkeypatch.setattr(overlap.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(overlap, "unsupported_reason", lambda: "network namespaces need root")
    assert overlap.main() == 3
    said = capsys.readouterr().err.splitlines()
    assert said == ["overlap: cannot be measured here: network namespaces need root"]


def test_token_files_that_cannot_be_prepared_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(command: list[str], check: bool = False, **_: Any) -> Any:
        if check:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(sys, "argv", ["overlap.py", "--quick"])
    monkeypatch.setattr(overlap, "unsupported_reason", lambda: None)
    monkeypatch.setattr(overlap.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(overlap.common, "machine", lambda: {"cores": 2})
    monkeypatch.setattr(overlap.common.subprocess, "run", fails)
    assert overlap.main() == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("overlap: dilocox data prepare ")
    assert said.endswith("ended with code 1")
