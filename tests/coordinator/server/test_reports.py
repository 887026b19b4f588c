"""What a site is told about its report: whether the report is in the run's metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.protocol import messages as m
from tests.coordinator.metrics.test_run_metrics import row
from tests.support.coordinator_driver import Driver, run_config
from tests.support.full_disk import FullDisk

pytestmark = pytest.mark.waits


class Reporting:
    """A coordinator with its metrics, to which site `a` reports as over the wire."""

    def __init__(self, root: Path) -> None:
        config = run_config(run={"folder": str(root / "run")})
        config.folder.mkdir()
        self.file = config.folder / "metrics.jsonl"
        self.driver = Driver(root / "coordinator", config, on_report=self.written)
        self.metrics = RunMetrics(config, config.folder, lambda record: None)
        self.driver.start()

    def written(self, *report: Any) -> bool:
        return self.metrics.report(*report)

    def report(self, round_: int, metrics: dict[str, Any], kind: m.ReportKind = "round") -> bool:
        rank = self.driver.ranks("a")[0]
        sent = m.ReportRequest(rank=rank, round=round_, kind=kind, metrics=metrics)
        come = m.ReportRequest.model_validate_json(sent.model_dump_json())
        reply = self.driver.core.report(come).model_dump_json()
        return m.ReportReply.model_validate_json(reply).kept

    def lines(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [line for line in found if line["kind"] == kind and "site" in line]


@pytest.fixture
def site(tmp_path: Path) -> Reporting:
    return Reporting(tmp_path)


def test_a_report_in_the_metrics_is_kept_also_when_it_comes_again(site: Reporting) -> None:
    """A site whose reply was lost asks again, perhaps of a coordinator that has started anew."""
    said = {**row(members=3), "grad_norm": math.inf, "waited_for": {"b": 0.5}}
    assert site.report(0, said)
    assert site.report(0, said)
    site.driver.reopen()
    site.metrics = RunMetrics(site.driver.config, site.driver.config.folder, lambda record: None)
    assert site.report(0, said)
    assert len(site.lines("round")) == 1


def test_what_the_metrics_lack_is_not_kept(site: Reporting) -> None:
    site.driver.plan(0, "a")
    assert site.report(1, row(1, members=3))
    assert not site.report(1, row(1, members=3, loss=2.0)), "another report of the round"
    assert not site.report(0, row(0, members=3)), "a round before the latest report"
    assert not site.report(2, {"loss": 1.0}), "no report of a round"
    site.driver.core.state.next_round = 20
    assert not site.report(3, row(3, members=3)), "a site that was busy for many rounds"
    assert [line["round"] for line in site.lines("round")] == [1]


def test_a_loss_that_is_not_finite_is_kept(site: Reporting) -> None:
    """It came as null, which is what JSON makes of it."""
    for after, loss in ((-1, math.inf), (0, math.nan)):
        kind: m.ReportKind = "evaluation" if after >= 0 else "first_evaluation"
        assert site.report(0, {"val_loss": loss, "after_round": after}, kind)
    assert [line["val_loss"] for line in site.lines("evaluation")] == [None, None]


def test_what_waits_for_room_on_the_disk_is_not_kept_yet(
    site: Reporting, full_disk: FullDisk
) -> None:
    """The line would be lost with the process."""
    full_disk.leave(3)
    assert not site.report(0, row(members=3))
    full_disk.free()
    assert site.report(1, row(1, members=3))
    assert site.report(1, row(1, members=3))
    assert [line["round"] for line in site.lines("round")] == [0, 1]


def test_an_older_site_and_an_older_coordinator_say_nothing_of_it() -> None:
    assert m.ReportReply().model_dump_json() == m.Done().model_dump_json()
    assert m.ReportReply.model_validate_json(m.Done().model_dump_json()).kept
    assert m.ReportReply(kept=False).model_dump_json() == '{"kept":false}'
