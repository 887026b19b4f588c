"""Audits of a run whose pieces are exchanged together in some rounds and apart in others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.neighbours import trained_in
from tests.tools.audit.test_cheats import audit

from dilocox.record.log.round_document import Document
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.start_state import under_way, wrong_start
from dilocox.training.builder import RankPlace

TOGETHER = {1: 1, 3: 1, 4: 1}
"""Rounds with one fragment, of five."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("together"), 5, {}, fragments=TOGETHER)


def test_what_lands_together_or_apart_is_repeated_exactly(trained: Path) -> None:
    payloads = []
    for round_ in range(5):
        verdict = audit(trained, "paris", round_)
        assert verdict.verdict == "EXACT", verdict
        payloads.append(int(verdict.reason.split(" steps, ")[1].split()[0]))
    # Those under way when the round began, and the round's own.
    assert payloads == [2, 1 + 1, 1 + 2, 1 + 1, 1 + 1]


def test_anchors_follow_from_payloads_of_both_kinds(trained: Path) -> None:
    case = AuditedRun(trained, (), None).case()
    place = RankPlace("paris", 0, 0)
    for round_ in range(5):
        state = case.course.rounds[(round_, "paris", 0, 0)]
        document = Document.from_bytes(case.get(state.document))
        get = case.of_round(round_).get
        assert wrong_start(case.course, place, state, document, get) is None
    # Round 1 has its one boundary at its end, round 2 two of them.
    assert [each.key.text for each in under_way(case.course, 0, 2, 8)] == ["outer/1/0/0"]
    assert [each.key.text for each in under_way(case.course, 0, 3, 12)] == ["outer/2/0/1"]
