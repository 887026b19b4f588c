"""What a site's terminal, or its log, shows of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dilocox.config.run_config import resolve_run
from dilocox.coordinator.metrics.run_metrics import RunMetrics
from dilocox.coordinator.protocol import messages as m
from dilocox.record.writer.rank_recorder import SigningIdentity
from dilocox.training.launch import site_log
from tests.support.coordinator_driver import run_config
from tests.support.record_scene import SIGNERS
from tests.support.served_run import Run

pytestmark = pytest.mark.waits

ROUND = {
    "step": 40, "loss": 3.14159, "tokens_per_second": 12_345.0, "wait_share": 0.256,
    "payload_bytes": 1_200_000,
}  # fmt: skip


def test_every_report_is_a_line() -> None:
    assert site_log.line_of("round", 4, ROUND) == (
        "round   4  step 40  loss 3.142   12.3k tokens/s  waited 25.6%  sent 1.2 MB"
    )
    not_finite = {key: value for key, value in ROUND.items() if key != "loss"}
    assert "loss -" in (site_log.line_of("round", 4, not_finite) or "")
    assert site_log.line_of("warning", 0, {"text": "the store is away"}) == "the store is away"
    after = {"val_loss": 2.5, "after_round": 3}
    assert site_log.line_of("evaluation", 3, after) == "held-out loss of the anchor: 2.5000"
    own = after | {"val_loss_by_source": {"web": 2.0, "\x1btickets": 3.0, "bad": "x"}}
    assert site_log.line_of("evaluation", 3, own) == (
        "held-out loss of the anchor: 2.5000 (web 2.0000, \ufffdtickets 3.0000)"
    )
    pairs = after | {"val_accuracy": 0.75, "val_margin": 0.1}
    assert site_log.line_of("evaluation", 3, pairs) == (
        "held-out loss of the anchor: 2.5000; 75.0% of pairs ranked right, mean margin 0.1000"
    )
    before = {"val_loss": 6.25, "after_round": -1}
    assert (site_log.line_of("first_evaluation", 0, before) or "").startswith(
        "held-out loss before"
    )
    # Model and reference are equal: of rounding errors above 0, the share says nothing.
    rounding = {"val_loss": 0.6931, "val_accuracy": 1.0, "val_margin": 2e-7}
    assert site_log.line_of("first_evaluation", 0, before | rounding) == (
        "held-out loss before training: 0.6931; mean margin 0.0000"
    )
    assert "flush" in (site_log.line_of("flush", 12, ROUND) or "")
    assert site_log.line_of("admission", 4, {}) is None


class Signing(site_log.TellingClient):
    """A client that keeps what it signs."""

    signed: int = 0

    def record_state(self, statement: str) -> None:
        self.signed += 1


def test_a_site_signs_what_the_coordinator_has_kept_and_shows_the_rest(tmp_path: Path) -> None:
    """A report that is signed and not in the metrics would make the site or the run look false."""
    recorder = RunMetrics(run_config("ab"), tmp_path, lambda record: None)
    run = Run(tmp_path / "coordinator", on_report=recorder.report)
    try:
        run.start()
        rank, told = m.RankId(site="a", stage=0, shard=0), list[str]()
        client = Signing(run.url, run.identities["a"], run.core.timeouts, rank)
        run.clients.append(client)
        client.tell, client.author = told.append, SigningIdentity("run", rank, SIGNERS["a"])
        kept = client.report(0, {"val_loss": math.nan, "after_round": -1}, "first_evaluation")
        assert (kept, client.signed) == (True, 1)
        run.core.state.next_round = 20
        kept = client.report(3, {"val_loss": 2.5, "after_round": 3}, "evaluation")
        assert (kept, client.signed) == (False, 1)
        assert told == [
            "held-out loss before training: nan", "held-out loss of the anchor: 2.5000",
        ]  # fmt: skip
    finally:
        run.close()
    assert (tmp_path / "metrics.jsonl").read_text().count('"kind": "evaluation"') == 1


def test_the_last_line_names_the_model(tmp_path: Path) -> None:
    config = resolve_run(
        {"run": {"folder": str(tmp_path)}, "model": {"path": "x"}, "sites": {"lyon": {}}}
    )
    assert "no model was published here" in site_log.end(config, "lyon")
    (tmp_path / "model").mkdir()
    assert site_log.end(config, "lyon") == f"site lyon is done; model {tmp_path / 'model'}"
