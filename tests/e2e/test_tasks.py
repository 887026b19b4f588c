"""A run that evaluates its anchors on tasks beside training: figures in every place, all signed."""

from __future__ import annotations

import json

import pytest

from dilocox.coordinator.protocol.task_figures import as_report, figures_of
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.page import build
from dilocox.tools.report.status import status_of
from dilocox.training.tasks.harness import TaskOptions, evaluate_folder
from tests.support.harness import PATIENT, Workshop
from tests.support.lm_tasks import CHOICE, PROSE, write_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytestmark = [pytest.mark.waits, pytest.mark.runs]


def test_figures_of_tasks_are_reported_shown_and_signed(workshop: Workshop) -> None:
    tasks = str(write_tasks(workshop.root / "lm-tasks"))
    run = workshop.train(
        "tasks", f"evaluation.tasks=['{tasks}']", "evaluation.tasks_every=3",
        "evaluation.tasks_limit=4", PATIENT,
    )  # fmt: skip
    found = run.records("tasks", site="paris")
    assert [(line["after_round"], line["step"]) for line in found] == [(2, 24), (3, 24)]
    for line in found:
        assert set(line["samples"]) == {CHOICE, PROSE}
    # The last figures are those of the published model.
    options = TaskOptions((tasks,), limit=4)
    own = as_report(figures_of(evaluate_folder(run.folder / "model", options)))
    assert found[-1]["results"] == pytest.approx(own["results"], rel=1e-5)
    summary = run.summary()
    assert summary["tasks_first"]["after_round"] == 2
    assert summary["tasks_last"]["results"] == found[-1]["results"]
    assert f"tasks after round 3: {CHOICE} acc " in run.printed()
    assert "evaluates the finished model on tasks" in run.printed()
    status = status_of(run.folder, 0.0)
    assert status.tasks is not None
    assert status.tasks["after_round"] == 3
    page = build(read_run(run.folder), 0.0)
    assert page.tasks.head == ("task", "metric", "examples", "after round 2", "after round 3")
    assert page.tasks.rows[0][:3] == (CHOICE, "acc", "4")
    # Models of rounds are removed, lm-eval's results are kept.
    kept = sorted(path.name for path in (run.folder / "evaluations" / "paris").iterdir())
    assert kept == ["round-00002.json", "round-00003.json"]
    said = {f.claim.name: f for f in verify(Places(run.folder), lambda *_: None).findings}
    assert said["metrics"].verdict == "PASS"
    assert "2 of tasks, which are reported and not recomputed" in said["metrics"].reason
    # A changed figure is found.
    path = run.folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines):
        line = json.loads(text)
        if line["kind"] == "tasks":
            line["results"][f"{CHOICE}/acc"] = 0.99
            lines[number] = json.dumps(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    said = {f.claim.name: f for f in verify(Places(run.folder), lambda *_: None).findings}
    assert said["metrics"].verdict == "FAIL"
    assert "the report on tasks after round 2" in said["metrics"].reason
