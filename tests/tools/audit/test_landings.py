"""What a landing has set is no site's own word: the rule it lands by, and where it leads.

States are kept of every second round, so that what a site changes between two others is in no
state's end that an audit repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import neighbours
from tests.support.neighbours import Neighbour, trained_in
from tests.tools.audit.test_cheats import audit

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol import messages as m
from dilocox.record.log.round_document import Document
from dilocox.record.writer.state_recorder import RecordingPolicy
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.judge import Case
from dilocox.tools.audit.start_state import wrong_start
from dilocox.training.builder import RankPlace

LYON = RankPlace("lyon", 0, 0)


@pytest.fixture
def every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = neighbours.run_config

    def run_config(root: Path, name: str, method: str = "dilocox") -> RunConfig:
        config = of_all(root, name, method)
        record = config.record.model_copy(update={"states_every": 2})
        return config.model_copy(update={"record": record})

    monkeypatch.setattr(neighbours, "run_config", run_config)
    monkeypatch.setattr(
        neighbours, "RecordingPolicy", lambda every, *more: RecordingPolicy(2, *more)
    )


def planned_with(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """All plans have these fields."""
    plan = neighbours.m.RoundPlan

    def changed(**fields: Any) -> m.RoundPlan:
        return plan(**{**fields, **changes})

    monkeypatch.setattr(neighbours.m, "RoundPlan", changed)


def test_another_landing_rule_than_the_plan_s_is_found(tmp_path: Path, every_second: None) -> None:
    @contextmanager
    def greedy(site: Neighbour) -> Iterator[None]:
        """What is under way after the round is to leave five times as much of its own progress."""
        yield
        for item in site.outer.pending:
            item.plan = item.plan.model_copy(update={"keep": 5.0, "residual_view": 1.0})

    folder = trained_in(tmp_path, 3, {1: greedy})
    assert audit(folder, "paris", 2).verdict == "EXACT"
    verdict = audit(folder, "lyon", 2)
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", -1), verdict
    assert "outer/1/0/1 is to land by another plan than the log says" in verdict.reason


def began(folder: Path, round_: int) -> tuple[Case, Any, Document]:
    case = AuditedRun(folder, (), None).case().of_round(round_)
    state = case.course.rounds[round_, "lyon", 0, 0]
    return case, state, Document.from_bytes(case.get(state.document))


def test_a_landing_is_named_once_and_in_its_place(tmp_path: Path) -> None:
    case, state, document = began(trained_in(tmp_path, 3, {}), 2)
    (item,) = document.state["pending"]

    def said(*pending: dict[str, Any]) -> str | None:
        other = replace(document, state={**document.state, "pending": list(pending)})
        return wrong_start(case.course, LYON, state, other, case.get)

    assert said(item) is None
    assert said(item, item) == "other exchanges are under way than the log says"
    assert said({**item, "plan": {}}) == "outer/1/0/1 is under way without a plan"
    assert said({"key": item["key"]}) == "the exchanges under way are not named"
    late = replace(state, tick=state.tick + 1)
    found = wrong_start(case.course, LYON, late, document, case.get)
    assert found == f"the state is that of slot {late.tick}, where the round does not begin"


@pytest.mark.parametrize("view", [0.0, 0.2])
def test_a_reference_is_where_its_piece_has_landed(
    tmp_path: Path, every_second: None, monkeypatch: pytest.MonkeyPatch, view: float
) -> None:
    """Contributions are taken from it: what is added there is in the next payload."""

    @contextmanager
    def moved(site: Neighbour) -> Iterator[None]:
        yield
        for state in site.outer.states:
            state.reference.add_(0.1)

    planned_with(monkeypatch, overlap="none", delay=0, residual_view=view)
    folder = trained_in(tmp_path, 3, {1: moved})
    assert audit(folder, "paris", 2).verdict == "EXACT"
    verdict = audit(folder, "lyon", 2)
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", -1), verdict
    assert "the reference of piece 0 is not where it has landed" in verdict.reason


@pytest.mark.parametrize("overlap", ["none", "keep"])
def test_parameters_are_at_their_reference_after_a_boundary(
    tmp_path: Path, every_second: None, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    @contextmanager
    def moved(site: Neighbour) -> Iterator[None]:
        yield
        for name in site.outer.states[-1].layout.names:
            site.rank.live[name].detach().add_(0.1)

    if overlap == "none":
        planned_with(monkeypatch, overlap="none", delay=0)
    folder = trained_in(tmp_path, 3, {1: moved})
    assert audit(folder, "paris", 2).verdict == "EXACT"
    verdict = audit(folder, "lyon", 2)
    assert (verdict.verdict, verdict.first_bad_step) == ("MISMATCH", -1), verdict
    assert "is not at its reference, though its boundary was just before" in verdict.reason
