"""The run's metrics and summary out of the sites' reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.metrics import run_metrics
from dilocox.coordinator.metrics.run_metrics import RunMetrics, combine
from dilocox.errors import DifferentAnchorsError, TrainingError
from dilocox.tools.report import tables
from dilocox.tools.report.folder import RunFiles
from dilocox.tools.report.history import read_history

pytestmark = pytest.mark.waits


def config(**outer: Any) -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "r"},
            "model": {"path": "x"},
            "outer": {"inner_steps": 20, **outer},
            "sites": {"paris": {}, "lyon": {}},
        }
    )


def row(round_: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "round": round_,
        "step": 20 * (round_ + 1),
        "tokens": 100,
        "seconds": 2.0,
        "tokens_per_second": 50.0,
        "wait_share": 0.1,
        "payload_bytes": 10,
        "allreduce_bytes": 1000,
        "ratio_per_transfer": 8.0,
        "ratio_per_token": 100.0,
        "members": 2,
        "loss": 3.0,
        "anchor_digest": f"anchor-{round_}",
    } | changes


def test_a_round_of_two_sites() -> None:
    combined = combine(
        {
            "paris": row(tokens=300, loss=2.0, wait_share=0.3, ratio_per_transfer=6.0),
            "lyon": row(tokens=100, loss=4.0, seconds=3.0, payload_bytes=30),
        }
    )
    assert combined["loss"] == pytest.approx((300 * 2 + 100 * 4) / 400)
    assert combined["tokens"] == 400
    assert combined["tokens_per_second"] == 100
    assert combined["seconds"] == 3.0
    assert combined["wait_share"] == 0.3
    assert (combined["payload_bytes"], combined["allreduce_bytes"]) == (40, 2000)
    assert combined["ratio_per_transfer"] == 7.0
    assert combined["ratio_per_token"] == 50.0
    assert combined["sites"] == 2
    assert "site" not in combined


def test_what_the_devices_of_two_sites_did() -> None:
    """MFU by peak: of a site whose peak is not known there is none."""
    fast = row(mfu=0.5, peak_flops=3e12, peak_memory_bytes=10, allocation_retries=1)
    slow = row(mfu=0.1, peak_flops=1e12, peak_memory_bytes=30, allocation_retries=2)
    combined = combine({"paris": fast, "lyon": slow, "oslo": row(peak_memory_bytes=20)})
    assert combined["mfu"] == pytest.approx(0.4)
    assert combined["peak_memory_bytes"] == 30
    assert combined["allocation_retries"] == 3
    assert not {"mfu", "peak_memory_bytes", "peak_reserved_bytes"} & combine({"a": row()}).keys()


REPORTS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.builds(
        lambda tokens, loss, payload: row(tokens=tokens, loss=loss, payload_bytes=payload),
        st.integers(1, 10**9),
        st.floats(0.0, 20.0),
        st.integers(0, 10**12),
    ),
    min_size=1,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(reports=REPORTS)
def test_combining_sums_bytes_and_stays_within_the_losses(reports: dict[str, Any]) -> None:
    combined = combine(reports)
    losses = [item["loss"] for item in reports.values()]
    assert min(losses) - 1e-6 <= combined["loss"] <= max(losses) + 1e-6
    for key in ("tokens", "payload_bytes", "allreduce_bytes"):
        assert combined[key] == sum(item[key] for item in reports.values())
    backwards = combine(dict(reversed(reports.items())))
    assert backwards["loss"] == pytest.approx(combined["loss"])
    assert {k: v for k, v in backwards.items() if k != "loss"} == {
        k: v for k, v in combined.items() if k != "loss"
    }


def test_a_site_that_took_no_steps_has_no_say_in_the_loss() -> None:
    idle = row(tokens=0)
    del idle["loss"]
    assert combine({"paris": row(loss=2.0), "lyon": idle})["loss"] == 2.0
    assert "loss" not in combine({"lyon": idle})
    assert combine({"paris": row(loss=2.0), "lyon": row(loss=math.nan)})["loss"] == 2.0


def test_different_anchors_end_the_run_with_sites_and_digests_named() -> None:
    with pytest.raises(TrainingError) as caught:
        combine({"paris": row(4, anchor_digest="a" * 64), "lyon": row(4, anchor_digest="b" * 64)})
    text = str(caught.value)
    assert text.startswith("round 4: the sites hold different anchors")
    assert f"paris {'a' * 12}" in text
    assert f"lyon {'b' * 12}" in text


class Run:
    """A recorder and what it emitted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.emitted: list[dict[str, Any]] = []
        self.recorder = RunMetrics(config(), folder, self.emitted.append)

    def report(self, site: str, round_: int, **changes: Any) -> None:
        values = row(round_, **changes)
        del values["round"]
        self.recorder.report(site, round_, "round", values)

    def rounds(self) -> list[dict[str, Any]]:
        return [r for r in self.emitted if r["kind"] == "round" and "site" not in r]

    def lines(self) -> list[dict[str, Any]]:
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def test_a_round_is_closed_when_all_members_have_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.report("paris", 0)
    assert run.rounds() == []
    run.report("lyon", 0)
    assert [r["tokens"] for r in run.rounds()] == [200]
    assert [line.get("site") for line in run.lines()] == ["paris", "lyon", None]


def test_a_dead_site_holds_no_round_up_and_a_late_one_still_counts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.report("paris", 0)
    run.report("paris", 1)
    assert [(r["round"], r["tokens"]) for r in run.rounds()] == [(0, 100)]
    run.report("lyon", 0)
    assert [(r["round"], r["tokens"]) for r in run.rounds()] == [(0, 100), (0, 200)]
    summary = run.recorder.finish("finished", "")
    assert (summary["rounds"], summary["tokens"]) == (2, 300)


def test_a_loss_from_before_training_is_none_from_after_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.recorder.report("paris", 0, "first_evaluation", {"val_loss": 6.0, "after_round": -1})
    run.report("paris", 0)
    run.report("lyon", 0)
    summary = run.recorder.finish("stopped", "interrupted")
    assert (summary["val_loss_first"], summary["val_loss_last"]) == (6.0, None)


def test_the_summary(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.recorder.report("paris", 0, "first_evaluation", {"val_loss": 6.0, "after_round": -1})
    for round_ in (0, 1):
        run.report("paris", round_)
        run.report("lyon", round_)
    flush = row(2, payload_bytes=5, allreduce_bytes=0, anchor_digest="last")
    for site in ("paris", "lyon"):
        run.recorder.report(site, 2, "flush", flush)
    run.recorder.report("paris", 2, "evaluation", {"val_loss": 4.5, "after_round": 2})
    returned = run.recorder.finish("finished", "")
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary == returned
    assert (summary["val_loss_first"], summary["val_loss_last"]) == (6.0, 4.5)
    assert (summary["tokens"], summary["rounds"], summary["sites"]) == (400, 2, 2)
    assert summary["tokens_per_second"] == 100.0
    # The flush's bytes are counted: they go over the network too.
    assert (summary["payload_bytes"], summary["allreduce_bytes"]) == (50, 4000)
    assert summary["anchor_digest"] == "last"
    assert summary["stages"] == 1
    evaluations = [line for line in run.lines() if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [0, 60]


def test_the_held_out_loss_of_each_source(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for kind, after, first, second in (
        ("first_evaluation", -1, 6.0, 5.0),
        ("evaluation", 0, 4.0, 4.5),
        ("evaluation", 1, 3.0, 4.0),
    ):
        losses = {"web": first, "tickets": second, "odd": math.nan}
        report = {"val_loss": 5.0, "after_round": after, "val_loss_by_source": losses,
                  "val_accuracy": first / 8, "val_margin": second}  # fmt: skip
        run.recorder.report("paris", max(after, 0), kind, report)
        run.report("paris", max(after, 0))
    lines = [line for line in run.lines() if line["kind"] == "evaluation"]
    assert lines[-1]["val_loss_by_source"] == {"web": 3.0, "tickets": 4.0}
    again = Run(tmp_path)
    summary = again.recorder.finish("finished", "")
    assert summary["val_loss_by_source_first"] == {"web": 6.0, "tickets": 5.0}
    assert summary["val_loss_by_source_last"] == {"web": 3.0, "tickets": 4.0}
    assert (summary["val_accuracy_first"], summary["val_accuracy_last"]) == (0.75, 0.375)
    assert (summary["val_margin_first"], summary["val_margin_last"]) == (5.0, 4.0)
    again.recorder.forget_after(1)
    assert again.recorder.finish("finished", "")["val_loss_by_source_last"]["web"] == 4.0
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other")
    report = {"val_loss": 4.5, "after_round": 0, "val_accuracy": math.nan, "val_margin": "x"}
    other.recorder.report("paris", 0, "evaluation", report)
    summary = other.recorder.finish("finished", "")
    assert {key for key in summary if key.startswith("val_")} == {"val_loss_first", "val_loss_last"}


def test_a_run_that_ended_before_its_first_round_has_a_summary(tmp_path: Path) -> None:
    summary = Run(tmp_path).recorder.finish("failed", "all sites are gone")
    assert (summary["phase"], summary["reason"]) == ("failed", "all sites are gone")
    assert (summary["tokens"], summary["val_loss_first"], summary["anchor_digest"]) == (
        0,
        None,
        None,
    )


def test_a_held_out_loss_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    # As they come off the wire.
    run.recorder.report("paris", 0, "first_evaluation", {"val_loss": 6.0, "after_round": -1})
    assert run.recorder.report("paris", 0, "evaluation", {"val_loss": None, "after_round": 0})
    _, line, said = run.lines()
    assert (line["kind"], line["val_loss"]) == ("evaluation", None)
    assert said["text"] == "paris: the held-out loss after round 0 is not finite"
    assert math.isnan(run.emitted[1]["val_loss"])
    for each in (run, Run(tmp_path)):
        assert math.isnan(each.recorder.finish("finished", "")["val_loss_last"])
        text = (tmp_path / "summary.json").read_text(encoding="utf-8")
        summary = json.loads(text, parse_constant=lambda text: pytest.fail(text))
        assert (summary["val_loss_first"], summary["val_loss_last"]) == (6.0, None)


def test_a_resumed_run_counts_on_and_forgets_the_course_it_left(tmp_path: Path) -> None:
    first = Run(tmp_path)
    for round_ in range(3):
        for site in ("paris", "lyon"):
            first.report(site, round_, loss=float("nan") if round_ == 2 else 3.0)
    first.recorder.finish("stopped", "")
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "round", "rou')  # killed while it wrote
    again = Run(tmp_path)
    again.recorder.forget_after(2)
    for site in ("paris", "lyon"):
        again.report(site, 2, loss=1.5)
    summary = again.recorder.finish("finished", "")
    assert (summary["rounds"], summary["tokens"], summary["loss_last"]) == (3, 600, 1.5)
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    broken = [line for line in text if not line.endswith("}")]
    assert broken == ['{"kind": "round", "rou']
    assert all(json.loads(line) for line in text if line not in broken)
    assert sum('"site": "lyon"' in line for line in text) == 4


def test_a_recorder_that_was_killed_goes_on_and_counts_each_report_once(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.recorder.report("paris", 0, "first_evaluation", {"val_loss": 6.0, "after_round": -1})
    for site in ("paris", "lyon"):
        first.report(site, 0, loss=float("nan"))
    first.report("paris", 1)
    first.recorder.plan(PLAN)
    # Killed here: no summary. What the sites or the coordinator's log say again is no news.
    again = Run(tmp_path)
    again.recorder.plan(PLAN)
    again.recorder.report("paris", 0, "first_evaluation", {"val_loss": 6.0, "after_round": -1})
    for site, round_ in (("paris", 0), ("paris", 1), ("lyon", 1)):
        again.report(site, round_)
    assert [(r["round"], r["tokens"], r["sites"]) for r in again.rounds()] == [(1, 200, 2)]
    summary = again.recorder.finish("finished", "")
    assert (summary["rounds"], summary["tokens"], summary["val_loss_first"]) == (2, 400, 6.0)
    assert len(again.lines()) == 8
    # After a resume the same rounds are news again, also to a third process.
    third = Run(tmp_path)
    third.recorder.forget_after(1)
    third.report("paris", 1, tokens=7)
    fourth = Run(tmp_path)
    fourth.report("lyon", 1, tokens=8)
    assert [(r["round"], r["tokens"]) for r in fourth.rounds()] == [(1, 15)]


def test_what_a_site_warns_of_and_what_it_drops_is_shown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.recorder.report("lyon", 4, "warning", {"text": "checkpoint after slot 40 was not written"})
    run.report("lyon", 4, dropped="stage 1: loss")
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    said = [record["text"] for record in map(json.loads, lines) if record["kind"] == "message"]
    assert said[0] == "lyon: checkpoint after slot 40 was not written"
    assert said[1].startswith("lyon, round 4: stage 1: loss is not finite")


PLAN = {
    "kind": "train", "round": 0, "first_step": 0, "inner_steps": 20, "slots": 20,
    "fragments": 4, "delay": 5,
    "codec": "int4", "learning_rate": 0.8, "momentum": 0.5, "residual_decay": 1.0,
    "residual_view": 0.0, "keep": 1.0,
    "reason": "nothing is measured yet",
}  # fmt: skip


def test_a_slow_site_without_a_step_is_no_anomaly(tmp_path: Path) -> None:
    """As two sites on one loaded machine: rounds of two steps, of which one site takes one."""
    run = Run(tmp_path)
    paces = {"paris": {"pace": 600, "carry": 200}, "lyon": {"pace": 1000, "carry": 0}}
    short = {"inner_steps": 2, "slots": 2, "fragments": 4}
    for round_ in (6, 7):
        run.recorder.plan({**PLAN, **short, "round": round_, "members": paces})
    # Fragments 0 and 1 have their boundary after one step, of which paris has taken 0.8.
    for round_, fragment, site in ((6, 0, "paris"), (6, 1, "paris"), (7, 0, "paris")):
        zero = {"exchange": f"outer/{round_}/0/{fragment}", "code": "zero", "flags": []}
        run.recorder.report(site, round_, "admission", zero)
    (line,) = [record for record in run.lines() if record["kind"] == "message"]
    assert (line["about"], "none of its inner steps is done by then" in line["text"]) == (
        "members", True,
    )  # fmt: skip
    assert "0.60 of the typical speed" in line["text"]
    records = [record for record in run.lines() if record["kind"] == "admission"]
    assert [record["idle"] for record in records] == [True] * 3
    # After the round's second step it has one, and lyon has one after the first.
    for fragment, site in ((2, "paris"), (0, "lyon")):
        zero = {"exchange": f"outer/7/0/{fragment}", "code": "zero", "flags": []}
        run.recorder.report(site, 7, "admission", zero)
    texts = [record["text"] for record in run.lines() if record["kind"] == "message"][1:]
    assert texts == [f"{s}, round 7: its contribution does not count: zero" for s in paces]
    counts = {site: {"zero": 1} for site in paces}
    assert run.recorder.finish("finished", "")["admission"] == counts
    assert Run(tmp_path).recorder.finish("finished", "")["admission"] == counts
    found = read_history(run.lines())
    assert [each.idle for each in found.admissions] == [True, True, True, False, False]
    assert len(tables.anomalies(found, RunFiles(tmp_path)).rows) == 2


def test_plans_are_written_down_where_they_change(tmp_path: Path) -> None:
    run = Run(tmp_path)
    changed = {"inner_steps": 5, "slots": 5, "delay": 1, "codec": "topk:82"}
    run.recorder.plan(PLAN)
    run.recorder.plan(PLAN | {"round": 1, "first_step": 20, "reason": "said otherwise"})
    run.recorder.plan(PLAN | changed | {"round": 2, "first_step": 40, "reason": "why"})
    run.recorder.plan(PLAN | changed | {"round": 3, "first_step": 45, "reason": "why"})
    # The flush is not chosen.
    run.recorder.plan(PLAN | {"kind": "flush", "round": 4, "first_step": 50, "codec": "int8"})
    plans = [line for line in run.lines() if line["kind"] == "plan"]
    assert [(line["round"], line["step"], line["codec"]) for line in plans] == [
        (0, 0, "int4"),
        (2, 40, "topk:82"),
    ]
    assert plans[1]["reason"] == "why"
    kept = [line for line in run.lines() if line["kind"] == "plan_kept"]
    assert [(line["round"], line["step"], line["reason"]) for line in kept] == [
        (1, 20, "said otherwise"),
    ]
    # A coordinator that starts again and is asked for the plan of the round repeats nothing.
    again = RunMetrics(run.recorder._config, tmp_path, lambda record: None)
    again.plan(PLAN | changed | {"round": 3, "first_step": 45, "reason": "why"})
    assert [line["kind"] for line in run.lines()] == ["plan", "plan_kept", "plan"]


def test_a_report_never_says_who_reports_or_of_which_round(tmp_path: Path) -> None:
    run = Run(tmp_path)
    forged = {"kind": "resumed", "site": "paris", "round": 7, "time": 0.0, "about": "members"}
    run.recorder.report("lyon", 3, "warning", {"text": "x", **forged})
    run.recorder.report("lyon", 3, "evaluation", {"val_loss": 1.0, "after_round": 3, **forged})
    said, line = run.lines()
    assert (said["kind"], said["text"], "about" in said) == ("message", "lyon: x", False)
    assert (line["kind"], line["site"], line["round"]) == ("evaluation", "lyon", 3)
    assert "about" not in line
    assert line["time"] > 0


@pytest.mark.parametrize(
    ("kind", "metrics", "why"),
    [
        ("x", {"kind": "evaluation"}, "there is no report of the kind x"),
        ("evaluation", {}, "val_loss is missing"),
        ("evaluation", {"val_loss": "low", "after_round": 0}, "val_loss is missing"),
        ("evaluation", {"val_loss": 1.0, "after_round": -1}, "after_round is missing"),
        ("warning", {"text": ["x"]}, "text is missing"),
        ("round", {"tokens": 1}, "step is missing"),
        ("round", row(members=float("nan")), "members is missing"),
        ("round", row(seconds=-1.0), "seconds is missing"),
        ("flush", row(anchor_digest=["x"]), "anchor_digest is missing"),
        ("round", row(tokens=10**400), "tokens is missing"),
    ],
)
def test_a_report_that_is_none_is_left_out(
    tmp_path: Path, kind: str, metrics: dict[str, Any], why: str
) -> None:
    run = Run(tmp_path)
    run.recorder.report("lyon", 3, kind, metrics)
    (line,) = run.lines()
    assert line["kind"] == "message"
    assert line["text"].startswith(f"lyon, round 3: its report is left out: {why}")
    for site in ("paris", "lyon"):
        run.report(site, 3)
    assert len(run.rounds()) == 1


def test_a_file_with_lines_that_say_nothing_is_gone_on_with(tmp_path: Path) -> None:
    """As an earlier version wrote them, in the name of whoever a site named."""
    lines: list[Any] = [
        {"kind": "evaluation", "round": 0, "site": "lyon"},
        {"kind": "round", "round": 0, "site": ["lyon"]},
        {"kind": "round", "round": 0, "site": "lyon"},
        {"kind": "round", "round": [0]},
        {"kind": "plan_kept"},
        {"kind": "admission", "round": 0},
        {"kind": "resumed", "round": None, "site": "x"},
        {"kind": "evaluation", "after_round": "0", "val_loss": {}},
        7,
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    run = Run(tmp_path)
    for site in ("paris", "lyon"):
        run.report(site, 1)
    assert run.recorder.finish("finished", "")["tokens"] == 200


def test_a_lone_anchor_is_its_own_sites_fault(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.recorder.plan({"round": 0, "kind": "flush", "members": dict.fromkeys("abcm")})
    run.report("m", 0, anchor_digest="f" * 64, members=1)
    # Two of four say nothing yet: of the two that do nobody is right.
    run.report("a", 0, members=4)
    run.report("b", 0, members=4)
    with pytest.raises(DifferentAnchorsError, match="round 0: it holds another anchor") as caught:
        run.report("c", 0, members=4)
    assert caught.value.sites == ["m"]
    (closed,) = run.rounds()
    assert closed["anchor_digest"] == "anchor-0"
    # Said once: the site may come again meanwhile.
    run.report("m", 1, members=4)
    for site in "abc":
        run.report(site, 1, members=4)


def test_a_round_that_the_others_ended_without_a_site_survives_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.report("paris", 0, anchor_digest=None)
    Run(tmp_path).report("lyon", 0)


def test_reports_of_a_long_run_are_remembered_for_some_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_metrics, "WRITTEN", 5)

    def told(where: RunMetrics, *rounds: int) -> int:
        for round_ in rounds:
            for site in ("paris", "lyon"):
                where.report(site, round_, "round", row(round_))
        return (tmp_path / "metrics.jsonl").read_text().count('"site"')

    first = RunMetrics(config(), tmp_path, lambda record: None)
    assert told(first, *range(40)) == 80
    assert len(first._written) <= 2 * 5 + 1
    again = RunMetrics(config(), tmp_path, lambda record: None)
    assert len(again._written) <= 2 * 5 + 1
    for each in (first, again):
        assert told(each, *range(35, 40)) == 80, "they are in the file"
