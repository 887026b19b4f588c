"""What becomes of a run whose first site comes too late to the flush."""

from __future__ import annotations

import json

import pytest

from tests.support.forge import Forge
from tests.support.harness import Workshop, verdicts

pytestmark = pytest.mark.runs


def test_the_model_is_that_of_the_sites_that_were_there(workshop: Workshop, forge: Forge) -> None:
    """Paris, the first site, is overtaken in the flush: lyon evaluates and publishes."""
    sets = ("outer.rounds=2", "site.stages=1", "network.link_timeout=24", "network.heartbeat=10")
    run = forge.train(workshop, "late-at-the-flush", *sets, hooks="late-at-the-flush")
    assert run.wait() == 0, run.output()
    assert "paris is left behind" in run.printed()
    assert run.summary()["phase"] == "finished"
    assert json.loads((run.folder / "model" / "config.json").read_text())["hidden_size"] == 32
    assert verdicts(run.folder) == {}
    last = run.records("evaluation", "lyon")[-1]
    assert (last["after_round"], last["val_loss"]) == (2, run.summary()["val_loss_last"])
    published = run.records("flush", "lyon")[-1]["anchor_digest"]
    assert run.summary()["anchor_digest"] == published
