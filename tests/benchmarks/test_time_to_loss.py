"""The time to a loss: which runs are made, when a loss is reached, and what bounds come to."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.quality.tuning import Rates
from benchmarks.time_to_loss import cases, command, curve, report
from benchmarks.time_to_loss.cases import BASELINE, OURS, TOLD, UNDECLARED, Case

from benchmarks import common
from dilocox.errors import DilocoxError

RATES = {label: Rates(3e-3) for label in cases.entries()}
Row = dict[str, Any]


def row(case: Case, loss: float | None, **fields: Any) -> Row:
    return {**case.key, "val_loss": loss, **fields}


def test_trials_of_synchronous_training_go_on_until_the_best_rate_lies_within() -> None:
    rows: list[Row] = []
    losses = {1.5e-3: 2.0, 3e-3: 1.9, 6e-3: 1.8, 1.2e-2: 1.85}
    while case := cases.trial(rows, "perl", RATES):
        assert (case.kind, case.label, case.seed) == ("plain", BASELINE, 0)
        rows.append(row(case, losses[case.rate]))
    assert cases.tried(rows, "perl") == losses
    assert cases.tried(rows, "mixed") == {}


def test_timed_runs_of_dilocox_become_longer_until_one_has_the_loss() -> None:
    rows: list[Row] = []
    made = []
    while case := cases.timed(rows, "perl", 0, 3e-3, 6e-3):
        made.append((case.kind, case.label, case.rate, case.length))
        reached = case.kind == "reference" or case.length >= 1.1
        rows.append(row(case, 2.0 if reached else 2.1))
    assert made == [
        ("reference", BASELINE, 3e-3, 1.0),
        ("link", OURS, 6e-3, 1.0),
        ("link", OURS, 6e-3, 1.05),
        ("link", OURS, 6e-3, 1.1),
        ("link", UNDECLARED, 6e-3, 1.0),
    ]


def test_other_seeds_have_no_undeclared_run() -> None:
    rows = [
        row(Case("reference", "perl", BASELINE, 1, 3e-3), 2.0),
        row(Case("link", "perl", OURS, 1, 6e-3), 2.0),
    ]
    assert cases.timed(rows, "perl", 1, 3e-3, 6e-3) is None


def test_other_methods_have_two_rates_and_longer_runs_at_the_better_one() -> None:
    rows: list[Row] = []
    made = []
    while case := next(cases.rivals(rows, "perl", RATES, 2.0), None):
        made.append((case.label, case.rate, case.length))
        loss = 2.3 if case.rate == 6e-3 else 2.4
        rows.append(row(case, 1.9 if case.label == "sparseloco" else loss))
    assert made == [
        ("diloco", 3e-3, 1.0),
        ("diloco", 6e-3, 1.0),
        ("diloco", 6e-3, 1.25),
        ("diloco", 6e-3, 2.0),
        ("sparseloco", 3e-3, 1.0),
        ("sparseloco", 6e-3, 1.0),
        ("dilocox-paper", 3e-3, 1.0),
        ("dilocox-paper", 6e-3, 1.0),
        ("dilocox-paper", 6e-3, 1.25),
        ("dilocox-paper", 6e-3, 2.0),
    ]


def test_dilocox_alone_declares_link_and_step_time() -> None:
    said = {"control.link": "62.000kbit", "control.step_seconds": 0.9}
    assert cases.declared(Case("link", "perl", OURS, 0, 6e-3), "62.000kbit", 0.9) == said
    assert cases.declared(Case("link", "perl", UNDECLARED, 0, 6e-3), "62.000kbit", 0.9) == {}


def test_dilocox_told_counts_messages_besides() -> None:
    said = cases.declared(Case("link", "perl", TOLD, 1, 6e-3), "64.000kbit", 0.8)
    # 5,800 bytes in 1.6 s are 29 kbit/s; 1,600 bytes take 0.2 s.
    assert said == {
        "control.link": "35.000kbit",
        "control.step_seconds": 0.8,
        "control.latency": 0.2,
        "outer.fragments": 2,
    }


def test_the_second_protocol_has_runs_of_dilocox_told_alone() -> None:
    rows: list[Row] = []
    made = []
    while case := cases.timed(rows, "perl", 0, 3e-3, 6e-3, TOLD):
        made.append((case.kind, case.label, case.length))
        rows.append(row(case, 2.0))
    assert made == [("reference", BASELINE, 1.0), ("link", TOLD, 1.0)]


POINTS = [(0.0, 0, 5.0), (10.0, 40, 3.0), (30.0, 80, 2.0), (40.0, 120, 2.5)]


def test_the_time_of_a_loss_is_interpolated_between_evaluations() -> None:
    assert curve.seconds_to(POINTS, 2.5) == 20.0
    assert curve.steps_to(POINTS, 2.5) == 60.0
    assert curve.seconds_to(POINTS, 2.0) == 30.0
    assert curve.seconds_to(POINTS, 5.0) == 0.0
    assert curve.seconds_to(POINTS, 1.9) is None


def test_a_curve_is_read_as_it_was_written() -> None:
    assert curve.read(curve.written(POINTS)) == POINTS


def test_the_curve_of_a_run_counts_from_the_record_with_which_training_begins() -> None:
    records = [
        {"kind": "message", "text": "enrolled", "time": 90.0},
        {"kind": "message", "text": "running", "time": 100.0},
        {"kind": "evaluation", "time": 104.5, "step": 0, "val_loss": 5.5},
    ]
    assert curve.curve(records) == [(4.5, 0, 5.5)]


BASE = {"val_loss": 2.0, "seconds": 100.0, "wait_seconds": 20.0, "payload_bytes": 8000, "steps": 80}


@pytest.mark.parametrize(("overlaps", "seconds"), [(False, 60.0 + 240.0), (True, 240.0)])
def test_a_bound_has_computing_alone_and_payloads_at_the_full_rate(
    overlaps: bool, seconds: float
) -> None:
    # By hand: the loss 2.5 takes 60 steps of 1 s. 100 bytes a step are 800 bits, at 200 bit/s 4 s.
    reference = report.Reference(2.5, 100.0, 80.0, 100.0, 80)
    fields = {"curve": curve.written(POINTS), "overlaps": overlaps}
    found = report.bound({**BASE, **fields}, reference, 200.0)
    assert found == pytest.approx(seconds)


def test_a_run_that_never_has_the_loss_has_no_bound() -> None:
    reference = report.Reference(1.0, 100.0, 80.0, 100.0, 80)
    assert report.bound({**BASE, "curve": curve.written(POINTS)}, reference, 200.0) is None


def test_the_bound_of_synchronous_training_leaves_its_waiting_out() -> None:
    reference = report.reference_of(BASE)
    assert reference.computing == 80.0
    # 8,000 bytes at 200 bit/s take 320 s.
    assert report.synchronous_bound(reference, 200.0) == pytest.approx(400.0)


def timed_rows(ours: float) -> list[Row]:
    """Return the rows of a seed of `perl`, in which dilocox ends after `ours` seconds."""
    common_fields = {"reduction_total": 400.0, "plans": "topk:20 H=1 x640", "overlaps": True}
    base = {**BASE, **common_fields, "curve": "0.00/0/5.0 100.00/640/2.0"}
    own = {**base, "curve": f"0.00/0/5.0 {ours:.2f}/640/2.0", "link_bits_per_second": 62_000}
    return [
        {**base, **Case("reference", "perl", BASELINE, 0, 3e-3).key},
        {**own, **Case("link", "perl", OURS, 0, 6e-3).key},
    ]


def test_each_protocol_has_its_verdict() -> None:
    told = Case("link", "perl", TOLD, 0, 6e-3)
    rows = [*timed_rows(106.0), {**timed_rows(104.0)[1], **told.key}]
    [first, second] = (report.verdict(report.lines(rows, "perl"), "perl") or "").splitlines()
    assert first.startswith("perl: dilocox takes")
    assert "MISSES" in first
    assert second.startswith("perl: dilocox told takes")
    assert "meets" in second


@pytest.mark.parametrize(("seconds", "said"), [(104.0, "which meets"), (106.0, "which MISSES")])
def test_the_verdict_is_over_the_time_of_synchronous_training(seconds: float, said: str) -> None:
    known = report.lines(timed_rows(seconds), "perl")
    assert [line["how"] for line in known] == ["no limit", "measured", "at least"]
    assert said in (report.verdict(known, "perl") or "")


def test_a_loss_that_is_not_reached_is_a_miss() -> None:
    rows = timed_rows(100.0)
    rows[1] |= {"val_loss": 2.2, "curve": "0.00/0/5.0 100.00/640/2.2"}
    known = report.lines(rows, "perl")
    assert known[1]["minutes"] is None
    assert "did not reach the loss" in (report.verdict(known, "perl") or "")


def test_committed_rows_are_of_the_protocol_as_it_is() -> None:
    digest = hashlib.sha256(command.PROTOCOL.read_bytes()).hexdigest()
    for path in common.RESULTS.glob("time_to_loss*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert found["settings"]["protocol"] == digest, path.name
        second = found["settings"].get("second")
        assert second in (None, hashlib.sha256(command.SECOND.read_bytes()).hexdigest())
        assert (second is not None) is any(row["label"] == TOLD for row in found["rows"])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the benchmark with stand-ins for training and text; `made` has the runs in order."""
    monkeypatch.setattr(command.common, "machine", dict)
    monkeypatch.setattr(command.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(command, "unsupported_reason", lambda: None)
    monkeypatch.setattr(command.WorkTexts, "tokenised", lambda *_: None)
    monkeypatch.setattr(command.WorkTexts, "digest", lambda *_: "d")

    def call(made: list[Case], fail: Any, *words: str) -> int:
        def train(_bench: object, case: Case, _text: object) -> Row:
            made.append(case)
            if fail(case):
                raise DilocoxError("round 1 had 1 of 2 sites")
            more = {"failed": None, "seconds": 1.0, "cpu_seconds": 1.0}
            return row(case, 2.0 + abs(math.log(case.rate / 3e-3)), **more)

        monkeypatch.setattr(command.Bench, "_train", train)
        monkeypatch.setattr(sys, "argv", ["time_to_loss", "--texts", "x", *words])
        return command.main()

    return call


def test_no_timed_run_is_made_at_a_rate_whose_trials_are_not_complete(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.Bench, "show", lambda self: None)
    words = ("--json", str(tmp_path / "rows.json"), "--text", "perl")
    made: list[Case] = []
    assert bench(made, lambda case: case.rate == 3e-3, *words) == 1
    assert {case.kind for case in made} == {"plain"}
    made = []
    bench(made, lambda case: case.kind == "link", *words)
    assert [case.rate for case in made if case.kind == "reference"] == [3e-3] * 3


def test_rows_of_another_text_are_not_gone_on_with(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    words = ("--json", str(file), "--text", "perl", "--plain")
    bench([], lambda case: case.label != BASELINE or case.rate > 2e-3, *words)
    monkeypatch.setattr(command.WorkTexts, "digest", lambda *_: "e")
    with pytest.raises(SystemExit, match="rows of source perl, seed 0 are of another text"):
        bench([], lambda case: False, *words)


def test_results_are_listed_while_the_runs_go_on(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(path: Path) -> None:
        raise SystemExit(f"{path}: another benchmark uses it")

    monkeypatch.setattr(common, "claim", held)
    words = ("--json", str(tmp_path / "rows.json"))
    assert bench([], lambda case: False, "--list", *words) == 0
    with pytest.raises(SystemExit, match="another benchmark uses it"):
        bench([], lambda case: False, "--plain", *words)
