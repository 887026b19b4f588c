"""What a site's terminal, or its log, shows of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.config.run_config import resolve_run
from dilocox.training.launch import site_log

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
    assert "flush" in (site_log.line_of("flush", 12, ROUND) or "")
    assert site_log.line_of("admission", 4, {}) is None


def test_the_last_line_names_the_model(tmp_path: Path) -> None:
    config = resolve_run(
        {"run": {"folder": str(tmp_path)}, "model": {"path": "x"}, "sites": {"lyon": {}}}
    )
    assert "no model was published here" in site_log.end(config, "lyon")
    (tmp_path / "model").mkdir()
    assert site_log.end(config, "lyon") == f"site lyon is done; model {tmp_path / 'model'}"
