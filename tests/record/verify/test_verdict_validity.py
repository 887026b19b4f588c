"""A resume undoes the verdicts on what it abandons, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log.statements import Signer
from dilocox.record.verify.audit_sampling import decided
from dilocox.record.verify.verdict_validity import is_about, stands
from tests.support.record_scene import Scene

AUDITOR = Signer.from_hex("77" * 32)


@pytest.mark.parametrize("tick", [0, 10**6])
def test_a_repeated_decision_that_the_resume_kept_undoes_no_verdict(
    tmp_path: Path, tick: int
) -> None:
    """At tick 0 the round is abandoned and decided anew; at the late one nothing is abandoned."""
    scene = Scene(tmp_path, record={"states_every": 1})
    scene.enrol()
    scene.driver.plan(0, "a")
    for fragment in (0, 1):
        scene.exchange(ExchangeKey.outer(0, 0, fragment))
    scene.hand_in(AUDITOR, "c", 0, "MISMATCH")
    scene.notary.resumed(0, tick)
    for said, subjects in scene.decisions():
        scene.decide(said, subjects)
    course = scene.course()
    (verdict,) = course.verdicts
    assert decided(course, 0)
    assert stands(course, verdict) == (tick > 0)
    assert {is_about(course, verdict, key) for key in course.steps} == {tick > 0}
