"""The lines of claims say of how many, by site, and by whose word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.identity import OPERATOR
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.refusals import Caller
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.verify.counts import told_commitments, told_complete, told_signers, told_sites
from dilocox.record.verify.run_history import RunHistory
from tests.support.record_scene import KEY, SIGNERS, Scene


def held_out(scene: Scene) -> RunHistory:
    """b withdraws from the first exchange; in the second nobody but a counts, who says so."""
    scene.begin()
    for site in "abc":
        scene.vote(site, contributes=site != "b")
    second = ExchangeKey.outer(0, 0, 1)
    scene.begin(second)
    for site in "abc":
        scene.vote(site, second)
    course = scene.course()
    step = course.steps[second.text]
    verdicts = {"b": {"code": "not-held"}, "c": {"code": "not-held"}}
    alone = replace(
        step, set=("a",), payloads={"a/0": step.payloads["a/0"]},
        said={**step.said, "verdicts": verdicts},
    )  # fmt: skip
    course.steps[second.text] = alone
    return course


def test_who_is_left_out_is_told_with_the_reason(scene: Scene) -> None:
    """One site that says it holds nothing of the others' would be seen at once."""
    assert told_sites(held_out(scene)) == (
        "3 of 6 contributions of the planned members count: a 2 of 2, b 0 of 2 (1 not-held, "
        "1 withdrawn), c 1 of 2 (1 not-held); in 1 outer steps fewer than half of the members count"
    )


def test_how_much_of_the_plan_was_done_is_told(scene: Scene) -> None:
    assert told_complete(held_out(scene)).startswith(
        "1 rounds with the flush, 4 of 16 planned inner steps, 2 outer steps; "
    )


def test_who_was_planned_and_never_voted_is_absent(scene: Scene) -> None:
    scene.exchange()
    course = scene.course()
    step = course.steps[KEY.text]
    course.steps[KEY.text] = replace(step, set=("a", "b"), said={**step.said, "verdicts": {}})
    assert "c 0 of 1 (1 absent or set aside)" in told_sites(course)


def test_the_coordinator_s_word_is_called_so(scene: Scene) -> None:
    scene.exchange()
    assert told_commitments(scene.course()).endswith("in the coordinator's order")


def test_keys_and_unknown_statements_are_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    key = SIGNERS["a"]
    for site, signer in {"a": key, "b": key, "c": SIGNERS["c"]}.items():
        scene.driver.enrol(site, record_key=signer.public)
    scene.driver.leave("c")
    request = m.StandingRequest(site="c", change="forget-key")
    scene.driver.core.standings.change(request, Caller(OPERATOR, 0))
    scene.driver.enrol("c", record_key=SIGNERS["b"].public)
    kinds = ("urn:other:one:v1", "urn:other:two:v1", "urn:other:two:v1")
    for kind in kinds:
        said = s.Statement(kind, {}, {"run": scene.notary.run})
        scene.notary.writer.append(key.sign(said))
    assert told_signers(scene.course()) == (
        "9 statements by the coordinator and 3 sites (c with 2 keys); a and b have one key; "
        "3 of unknown types, not looked at: urn:other:one:v1, urn:other:two:v1"
    )


@pytest.mark.parametrize(
    "said", [{"verdicts": 3}, {"verdicts": {"b": 3}}, {"members": 3}, {"inner_steps": "x"}]
)
def test_what_a_stranger_says_ends_in_one_line(scene: Scene, said: dict[str, Any]) -> None:
    scene.exchange()
    course = scene.course()
    step = course.steps[KEY.text]
    course.steps[KEY.text] = replace(step, set=("a",), said={**step.said, **said})
    with pytest.raises(RecordError, match="is malformed"):
        told_complete(course)
