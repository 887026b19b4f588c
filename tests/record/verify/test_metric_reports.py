"""Sites sign the metrics that they report: the claim `metrics` compares metrics.jsonl with that."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.metric_reports import FILE, judge_reports, report_digest, signed_report
from dilocox.record.writer.rank_recorder import SigningIdentity
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.history import History, read_history
from tests.coordinator.metrics.test_run_metrics import row
from tests.support.record_scene import ONE, SIGNERS, Scene


class Reported:
    """Sites report rounds to a recorder and sign them, as they do in a run."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.folder = scene, scene.config.folder
        self.recorder = RunMetrics(scene.config, self.folder, lambda record: None)

    def report(self, site: str, round_: int, metrics: dict[str, Any], kind: str = "round") -> None:
        rank = m.RankId(site=site, stage=0, shard=0)
        request = {"rank": rank, "round": round_, "kind": kind, "metrics": metrics}
        sent = m.ReportRequest.model_validate(request).model_dump_json()
        come = m.ReportRequest.model_validate_json(sent)
        assert self.recorder.report(site, round_, kind, dict(come.metrics))
        text = signed_report(
            SigningIdentity(self.scene.notary.run, rank, SIGNERS[site]), kind, round_, metrics
        )
        assert text is not None
        self.scene.driver.core.witness.state(m.StateRequest(rank=rank, statement=text))

    def round(self, round_: int, kind: str = "round", loss: float = 3.0) -> None:
        for number, site in enumerate("abc"):
            own = row(round_, members=3, loss=loss + number, tokens=100 + number, time=1.0,
                      waited_for={"b": 0.5}, peak_flops=9.9e14, link_bytes=2**60)  # fmt: skip
            self.report(site, round_, {**own, "grad_norm": math.inf}, kind)

    def evaluated(self, after: int, loss: float) -> None:
        kind = "evaluation" if after >= 0 else "first_evaluation"
        own = {"val_loss": loss, "after_round": after, "val_loss_by_source": {"web": loss + 1},
               "val_accuracy": 0.5, "val_margin": 0.1}  # fmt: skip
        self.report("a", max(after, 0), own, kind)

    def judged(self) -> str:
        return judge_reports(self.scene.course(), self.folder)


@pytest.fixture
def reported(scene: Scene) -> Reported:
    """Two rounds and a flush, of three sites."""
    found = Reported(scene)
    found.evaluated(-1, 5.5)
    for round_ in range(2):
        found.round(round_)
        found.evaluated(round_, 5.0 - round_)
    found.round(2, "flush")
    return found


def test_what_sites_report_is_what_they_sign(reported: Reported) -> None:
    assert reported.judged() == (
        "9 reports of rounds and 3 of the held-out loss, signed by a, b, c"
    )


def rewritten(reported: Reported, change: Callable[[dict[str, Any]], bool | None]) -> None:
    """Each line of metrics.jsonl changed; left out where `change` says False."""
    path = reported.folder / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if change(line) is not False]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def of(kind: str, round_: int, site: str | None, **fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(line: dict[str, Any]) -> None:
        where = line.get("after_round", line.get("round")), line.get("site"), line["kind"]
        if where == (round_, site, kind):
            line.update(fields)

    return change


CHANGED: dict[str, tuple[Any, str]] = {
    "loss": (of("round", 1, "b", loss=2.0), "the report of round 1 is not the one that b has"),
    "tokens": (of("round", 1, "b", tokens=5), "the report of round 1 is not the one that b has"),
    "flush": (of("flush", 2, "c", loss=2.0), "the report of round 2 is not the one that c has"),
    "held-out": (of("evaluation", 1, "a", val_loss=3.0), "the held-out loss after round 1 is not"),
    "source": (of("evaluation", 1, "a", val_loss_by_source={"web": 1.0}),
               "the held-out loss after round 1 is not"),
    "pairs": (of("evaluation", 1, "a", val_accuracy=0.9),
              "the held-out loss after round 1 is not"),
    "first": (of("evaluation", -1, "a", val_loss=3.0), "the held-out loss before training is not"),
    "of the run": (of("round", 1, None, loss=2.0), "loss or tokens of round 1 are not what its"),
    "no loss": (of("round", 1, None, loss=None), "loss or tokens of round 1 are not what its"),
    "left out": (lambda line: (line["kind"], line.get("site")) != ("evaluation", "a"),
                 "the held-out loss before training, which a has signed, is not there"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_other_metrics_than_were_signed_fail(reported: Reported, name: str) -> None:
    change, said = CHANGED[name]
    rewritten(reported, change)
    with pytest.raises(RecordError, match=said):
        reported.judged()


def test_losses_that_are_not_finite_are_reported_and_signed(scene: Scene) -> None:
    """The loss that shows a divergence is in the metrics, and its site is no liar."""
    found = Reported(scene)
    found.evaluated(-1, 5.5)
    found.evaluated(0, math.nan)
    found.round(0, loss=math.nan)
    for number, site in enumerate("abc"):
        found.report(site, 1, row(1, members=3, loss=math.inf if site == "b" else 1.0 + number))
    found.evaluated(1, math.inf)
    assert found.judged() == "6 reports of rounds and 3 of the held-out loss, signed by a, b, c"
    lines = [json.loads(line) for line in (found.folder / FILE).read_text().splitlines()]
    own = {line["round"]: line for line in lines if line["kind"] == "round" and "site" not in line}
    assert "loss" not in own[0]
    assert own[1]["loss"] == 2.0, "of the sites whose loss is finite"


def test_times_are_the_coordinator_s(reported: Reported) -> None:
    rewritten(reported, lambda line: line.update(time=0.0))
    assert "signed by a, b, c" in reported.judged()


def test_a_line_that_nobody_signed_is_named(reported: Reported) -> None:
    reported.recorder.report("b", 3, "round", row(3, members=1))
    with pytest.raises(NotRunError, match="the report of round 3 of b: not signed"):
        reported.judged()


def test_a_round_of_some_sites_is_not_taken_for_all(reported: Reported) -> None:
    rewritten(reported, of("round", 1, None, sites=2, loss=2.0))
    with pytest.raises(NotRunError, match="round 1 of the run was made of some sites' reports"):
        reported.judged()


def test_older_records_have_no_signed_metrics(reported: Reported) -> None:
    course = reported.scene.course()
    with pytest.raises(NotRunError, match="not there"):
        judge_reports(course, reported.folder / "elsewhere")
    manifest = {key: own for key, own in course.manifest.items() if key != "reports"}
    object.__setattr__(course, "manifest", manifest)
    with pytest.raises(NotRunError, match="whose sites signed no metrics"):
        judge_reports(course, reported.folder)


def test_after_a_resume_the_new_course_counts(reported: Reported) -> None:
    """Rounds that are trained anew have other losses; those of before it stay."""
    before = (reported.folder / FILE).read_text()
    reported.recorder.forget_after(1)
    reported.scene.notary.resumed(1, 8)
    reported.round(1, loss=2.5)
    reported.evaluated(1, 3.5)
    assert "6 reports of rounds and 3 of the held-out loss" in reported.judged()
    # The course that was left is not what is shown.
    rewritten(reported, of("round", 1, "b", loss=4.0))
    with pytest.raises(RecordError, match="the report of round 1"):
        judge_reports(reported.scene.course(), reported.folder)
    (reported.folder / FILE).write_text(before)
    with pytest.raises(RecordError):
        judge_reports(reported.scene.course(), reported.folder)


@pytest.mark.parametrize(
    "changes",
    [{"kind": "warning"}, {"round": -1}, {"round": "x"}, {"kind": None}, {"site": "b"}],
)
def test_what_is_no_report_of_the_caller_is_refused(scene: Scene, changes: dict[str, Any]) -> None:
    said = {"run": scene.notary.run, "site": "a", "stage": 0, "shard": 0, "round": 0,
            "kind": "round", **changes}  # fmt: skip
    text = SIGNERS["a"].sign(s.Statement(s.REPORT, {"report": ONE}, said))
    with pytest.raises(Refused):
        scene.driver.core.witness.state(
            m.StateRequest(rank=m.RankId(site="a", stage=0, shard=0), statement=text)
        )


def test_digests_are_of_what_a_line_says() -> None:
    said = {"loss": 3.0, "tokens": 2**60, "bad": math.nan, "waited_for": {"b": 1.0}}
    line = {"time": 5.0, "kind": "round", "site": "a", "round": 3, **said, "bad": None}
    assert report_digest("round", said) == report_digest("round", line)
    assert report_digest("round", said) != report_digest("round", {**said, "loss": 3.0000001})
    evaluated = {"val_loss": 3.0, "after_round": 2}
    assert report_digest("evaluation", evaluated) == report_digest(
        "evaluation", {**evaluated, "step": 8}
    )


def test_warnings_are_not_signed(tmp_path: Path) -> None:
    author = SigningIdentity("run", m.RankId(site="a", stage=0, shard=0), SIGNERS["a"])
    assert signed_report(author, "warning", 0, {"text": "x"}) is None


def shown(reported: Reported) -> History:
    """What the run's page shows."""
    return read_history(read_run(reported.folder).metrics)


def add(reported: Reported, line: str) -> None:
    with (reported.folder / FILE).open("a", encoding="utf-8", newline="") as file:
        file.write(line + "\n")


LOW = {"val_loss": 0.1, "loss": 0.1, "tokens": 9, "sites": 3, "step": 8}
FORGED: dict[str, dict[str, Any]] = {
    "no site": {"kind": "evaluation", "after_round": 1},
    "site that is no text": {"kind": "evaluation", "after_round": 1, "site": 5},
    "empty site": {"kind": "evaluation", "after_round": 1, "site": ""},
    "no round": {"kind": "evaluation", "site": "a"},
    "float": {"kind": "evaluation", "after_round": 1.0, "site": "a"},
    "truth value": {"kind": "evaluation", "after_round": True, "site": "a"},
    "before the start": {"kind": "evaluation", "after_round": -2, "site": "a"},
    "too large": {"kind": "evaluation", "after_round": 10**400, "site": "a"},
    "tasks": {"kind": "tasks", "after_round": 1.0, "site": "a", "results": {"t/acc": 1.0}},
    "kind of a report": {"kind": "first_evaluation", "round": -1, "after_round": -1, "site": "a"},
    "round as a float": {"kind": "round", "round": 1.0},
    "round as a truth value": {"kind": "round", "round": True},
    "round as text": {"kind": "round", "round": "1", "site": "a"},
    "round of a site that is no text": {"kind": "round", "round": 1, "site": 5},
    "round of no site": {"kind": "round", "round": 1, "site": None},
    "flush": {"kind": "flush", "round": 2, "payload_bytes": 0},
    "resumed": {"kind": "resumed", "round": 1.0},
    "resumed without a round": {"kind": "resumed"},
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_line_that_no_writer_writes_fails_and_is_not_shown(reported: Reported, name: str) -> None:
    before = shown(reported)
    lines = (reported.folder / FILE).read_text().count("\n")
    add(reported, json.dumps({**LOW, **FORGED[name], "time": 0.5}))
    with pytest.raises(RecordError, match=rf"metrics.jsonl: line {lines + 1}: "):
        reported.judged()
    assert shown(reported) == before


@pytest.mark.parametrize("between", ["\r", "\v", "\x85", "\u2028", " "])
def test_a_line_within_a_line_fails_and_is_not_shown(reported: Reported, between: str) -> None:
    before = shown(reported)
    forged = json.dumps({"kind": "evaluation", "after_round": 1, "site": "a", **LOW})
    add(reported, f'{{"kind": "message", "text": "a"}}{between}{forged}')
    with pytest.raises(RecordError, match=r"metrics.jsonl: line \d+ is damaged"):
        reported.judged()
    assert shown(reported) == before


def test_a_line_break_within_a_text_is_text(reported: Reported) -> None:
    add(reported, '{"kind": "message", "text": "a\u2028b\x85c"}')
    assert "signed by a, b, c" in reported.judged()
    assert shown(reported).events[-1].text == "a\u2028b\x85c"


@pytest.mark.parametrize("lost", [b"", b"\0" * 30])
def test_a_line_that_a_killed_process_left_is_passed_over(reported: Reported, lost: bytes) -> None:
    """The next process ends the line, and the site's report comes again."""
    path = reported.folder / FILE
    text = path.read_bytes()
    assert b'"kind": "flush"' in text.splitlines()[-1]
    path.write_bytes(text[:-30] + lost)
    reported.recorder = RunMetrics(reported.scene.config, reported.folder, lambda record: None)
    reported.round(2, "flush")
    reported.evaluated(2, 2.5)
    assert path.read_bytes().startswith(text[:-30] + lost + b"\n{")
    assert reported.judged().startswith("9 reports of rounds and 4 of the held-out loss, signed")
    assert shown(reported).evaluations[-1].loss == 2.5


def test_each_of_several_lines_must_be_signed(reported: Reported) -> None:
    """The page passes over a loss that is not finite, and would show the one before."""
    reported.evaluated(2, math.nan)
    forged = {"kind": "evaluation", "after_round": 2, "site": "a", "round": 2, **LOW}
    lines = (reported.folder / FILE).read_text().splitlines()
    lines.insert(-1, json.dumps(forged))
    (reported.folder / FILE).write_text("\n".join(lines) + "\n")
    assert [each.loss for each in shown(reported).evaluations][-1] == 0.1
    with pytest.raises(RecordError, match="the held-out loss after round 2 is not the one that a"):
        reported.judged()


def test_numbers_too_large_for_a_float_fail(reported: Reported) -> None:
    rewritten(reported, of("round", 1, None, tokens=10**400, loss=10**400))
    with pytest.raises(RecordError, match="loss or tokens of round 1"):
        reported.judged()
    rewritten(reported, of("round", 1, "b", loss=10**400))
    with pytest.raises(RecordError, match="the report of round 1 is not the one that b has"):
        judge_reports(reported.scene.course(), reported.folder)


def test_a_round_of_no_site_is_not_proved(reported: Reported) -> None:
    add(reported, json.dumps({"kind": "round", "round": 2, "sites": 0, "tokens": 0, "step": 9}))
    with pytest.raises(NotRunError, match="round 2 of the run was made of some sites' reports"):
        reported.judged()


def test_a_round_that_is_left_out_is_not_proved(reported: Reported) -> None:
    def gone(number: int) -> Callable[[dict[str, Any]], bool]:
        return lambda line: (line["kind"], line.get("site"), line.get("round")) != (
            "round", None, number
        )  # fmt: skip

    rewritten(reported, gone(1))
    assert "signed by a, b, c" in reported.judged()  # the newest round may still be going on
    rewritten(reported, gone(0))
    with pytest.raises(NotRunError, match="round 0 has reports of sites, and no line of the whole"):
        judge_reports(reported.scene.course(), reported.folder)
