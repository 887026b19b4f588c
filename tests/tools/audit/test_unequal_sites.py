"""Honest sites that did less or more than the plan's typical, or nothing, are accused of nothing.

One run of four steps a round: lyon takes three while paris takes six. Lyon is gone after the second
round, though the third was planned with it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.neighbours import STEPS, trained_in
from tests.tools.audit.test_cheats import audit, elsewhere, here, rates_off_by

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import GOOD, Signed, write
from dilocox.record.verify.audit_claims import Audits
from dilocox.record.verify.audit_sampling import sites_of
from dilocox.record.verify.run_history import RunHistory
from dilocox.tools.audit import judge as judging
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.judge import judge

__all__ = ["elsewhere"]

SLOWER, FASTER = 3, 6
SIGNER = s.Signer.from_hex("0a" * 32)
LAST = 1
"""Lyon's last round."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = {"lyon": SLOWER, "paris": FASTER}
    paces = {site: 1000 * count // STEPS for site, count in steps.items()}
    root = tmp_path_factory.mktemp("unequal")
    return trained_in(root, LAST + 2, {}, paces=paces, goes_after=LAST)


def test_a_slower_site_and_a_faster_one_are_exact(trained: Path) -> None:
    """Each is audited by the number of its own steps, and says so."""
    verdict = audit(trained, "lyon", 0)
    assert verdict.verdict == "EXACT", verdict
    assert verdict.reason == f"{SLOWER} steps, 2 payloads, the same bits"
    faster = audit(trained, "paris", 0)
    assert faster.verdict == "EXACT", faster
    assert faster.reason.startswith(f"{FASTER} steps")


def test_a_slower_site_from_another_class(
    trained: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_off_by(monkeypatch, 1e-6)
    verdict = audit(trained, "lyon", 0)
    assert verdict.verdict == "WITHIN_TOL", verdict


@pytest.mark.parametrize("count", [SLOWER - 1, STEPS])
def test_another_number_of_steps_than_its_own(
    trained: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    begin = judging._signed_round

    def other(*given: Any) -> Any:
        began = begin(*given)
        return replace(began, steps=(began.steps * 2)[:count])

    monkeypatch.setattr(judging, "_signed_round", other)
    verdict = audit(trained, "lyon", 0)
    assert verdict.verdict == "MISMATCH", verdict
    assert f"{count} steps instead of {SLOWER}" in verdict.reason
    assert verdict.first_bad_step == min(count, SLOWER) - 1


def test_a_site_that_was_gone_when_its_round_began(trained: Path, tmp_path: Path) -> None:
    """It withholds nothing: there is no state of a round that it had no part in."""
    shutil.copytree(trained, tmp_path / "run")
    run = AuditedRun(tmp_path / "run", (), None)
    assert "lyon" in run.course.plans[LAST + 1]["members"]
    assert (LAST + 1, "lyon", 0, 0) not in run.course.rounds
    verdict = audit(trained, "lyon", LAST + 1)
    assert verdict.verdict == "NOT_RUN", verdict
    assert "did not train this round" in verdict.reason
    # Nor do audits of all that is selected blame it, or wait for it.
    chosen = run.sampled(1.0)
    assert [(each.round, each.site) for each in chosen] == [
        (0, "lyon"), (0, "paris"), (1, "lyon"), (1, "paris"), (2, "paris"),
    ]  # fmt: skip
    for each in chosen:
        found = judge(run.case(), each.site, each.round, here, lambda step: None)
        assert found.verdict in GOOD, found
        selection = replace(each.selection, randomness="00")
        write(run.folder, Signed(found, selection, SIGNER.public, run.course.run), SIGNER, "00")
    assert Audits(run.course, run.entries, run.folder, ()).verdicts().startswith("5 of 5 rounds")


def test_a_site_that_contributed_withholds_its_state(trained: Path) -> None:
    """A payload of one attempt is enough, whether it counts or not."""
    case = AuditedRun(trained, (), None).case()
    key = ExchangeKey.outer(LAST + 1, 0, 0).text
    case.course.contributions[key, 1, "lyon", 0] = "00" * 32
    verdict = judge(case, "lyon", LAST + 1, here, lambda step: None)
    assert verdict.verdict == "FAIL", verdict
    assert "withheld" in verdict.reason


def test_what_was_left_behind_by_a_resume_is_no_part(trained: Path) -> None:
    """Lyon contributed, the run went back, and then it was not there any more."""
    run = AuditedRun(trained, (), None)
    assert sites_of(run.course, 0) == ["lyon", "paris"]
    course = resumed(run.course, 0, 0)
    assert not [where for where in course.contributions if where[0].startswith("outer/0")]
    again = resumed(AuditedRun(trained, (), None).course, 1, STEPS)
    assert ("outer/0/0/0", 1, "lyon", 0) in again.contributions, "what stays keeps its payloads"


def resumed(course: RunHistory, round_: int, tick: int) -> RunHistory:
    from dilocox.record.verify.run_history import _resumed

    said = {"run": course.run, "round": round_, "tick": tick}
    _resumed(course, {}, s.Statement(s.RESUME, {}, said))
    return course
