"""A site that causes a resume, and then chooses its contribution anew, is named."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import read_log
from dilocox.record.verify.counts import told_commitments
from dilocox.record.verify.run_history import RunHistory, read_history
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs

SITES = ("paris", "lyon", "oslo")
SETS = ("outer.rounds=5", "checkpoint.every_rounds=2", "site.stages=1", PATIENT)
KILLED = "kill/step/28/paris-stage0-shard0"
"""Round 3: the checkpoint is of the end of round 1, and round 2 is known to all."""


def course_of(run: Path) -> RunHistory:
    content = read_log(run / "record")
    return read_history(content.entries, NoteKey.parse(content.public))


@pytest.mark.parametrize(
    ("hooks", "again"),
    [
        # The two others of the second case go on as they were, too.
        pytest.param("none", set(), marks=pytest.mark.slow),
        ("other-lyon", {"lyon"}),
    ],
)
def test_who_commits_to_another_contribution_after_a_resume_is_named(
    workshop: Workshop, forge: Forge, hooks: str, again: set[str]
) -> None:
    name, sets = f"again-{hooks}", (*SETS, "admission.aggregation=clip")
    run = forge.train(workshop, name, *sets, hooks=KILLED, sites=SITES)
    assert run.wait() == -signal.SIGKILL, run.output()
    known = {key for key in course_of(run.folder).steps if key.startswith("outer/2/")}
    assert known, "round 2 was exchanged before the run died"
    run = forge.train(workshop, name, *sets, hooks=hooks, flags=("--resume",), sites=SITES)
    assert run.wait() == 0, run.output()
    course = course_of(run.folder)
    assert {site for _, site, _ in course.recommitments.found} == again
    assert ("recommitted after a resume" in told_commitments(course)) == bool(again)
    flagged = [r for site in SITES for r in run.records("admission", site)
               if r["code"] == "recommitted"]  # fmt: skip
    assert {record["site"] for record in flagged} == again
    assert {record["exchange"] for record in flagged} <= known
    assert verdicts(run.folder) == {}
