"""A replay reduces gradients as the site did, whatever memory the auditor's GPUs have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tests.inner.test_memory import LAYERS, PARTS
from tests.support.coordinator_driver import run_config

from dilocox.config.run_config import RunConfig
from dilocox.config.site import GradientSync
from dilocox.coordinator.protocol.messages import RoundPlan
from dilocox.inner.memory import sums_whole_gradients
from dilocox.record.log.round_document import Document
from dilocox.record.log.state_statements import RoundState
from dilocox.record.verify.run_history import RunHistory
from dilocox.tools.audit.comparison import SignedRound
from dilocox.tools.audit.judge import Case, _job
from dilocox.training.builder import RankPlace

FACTS: dict[str, Any] = {"device": "cpu", "threads": 1, "precision": "float32"}


def replayed(config: RunConfig, facts: dict[str, Any]) -> RunConfig:
    """The run file with which an auditor repeats a round of a rank that has these `facts`."""
    case = Case(cast(RunHistory, None), config, lambda _: b"", (), Path())
    start = Document({}, (), facts)
    began = SignedRound(RankPlace("paris", 0, 0), cast(RoundState, None), start, None, None, None)
    return _job(case, began, cast(RoundPlan, None)).config


@pytest.mark.parametrize(
    ("agreed", "stages", "layout", "again"),
    [
        ("auto", 1, {"gradient_sync": "step"}, "step"),
        ("auto", 1, {"shards": 2}, "micro-batch"),
        ("auto", 1, "none", "micro-batch"),
        ("auto", 2, {"shards": 2}, "auto"),
        # The rank's class is another one then, and the verdict goes by that.
        ("step", 1, {"shards": 2}, "step"),
        ("micro-batch", 1, {"gradient_sync": "step"}, "micro-batch"),
    ],
)
def test_a_replay_takes_the_order_of_sums_from_the_facts(
    agreed: GradientSync, stages: int, layout: Any, again: str
) -> None:
    config = run_config(site={"shards": 2, "stages": stages, "gradient_sync": agreed})
    found = replayed(config, {**FACTS, "layout": layout})
    assert found.site.gradient_sync == again


@pytest.mark.parametrize(("memory", "whole"), [(2**40, False), (1, True)])
def test_the_auditors_memory_decides_nothing(memory: int, whole: bool) -> None:
    config = run_config(shards=2)
    layout = {"gradient_sync": "step"} if whole else {}
    found = replayed(config, {**FACTS, "layout": layout})
    assert sums_whole_gradients(config, LAYERS, PARTS, memory, 2) is not whole
    assert sums_whole_gradients(found, LAYERS, PARTS, memory, 2) is whole
