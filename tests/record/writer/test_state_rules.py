"""What one site signs of states does not keep the others' record from being read, or believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.notary import Decision
from dilocox.coordinator.server.refusals import Refused
from dilocox.record.log import statements as s
from dilocox.record.verify.completeness import gaps
from dilocox.record.writer.state_rules import Holds
from tests.record.writer.test_notary import decision
from tests.support.coordinator_driver import VERSIONS
from tests.support.record_scene import ONE, SIGNERS, Scene

TWO, THREE = "2" * 64, "3" * 64


def held(scene: Scene, site: str, kind: str, root: str = ONE, **changes: Any) -> str:
    """A site signs a model state; the text of its statement."""
    said = {"run": scene.notary.run, "site": site, "stage": 0, "round": 0, "kind": kind,
            "files": {}, **changes}  # fmt: skip
    text = SIGNERS[site].sign(s.Statement(s.CHECKPOINT, {"state": root, "tensors": root}, said))
    scene.notary.checkpoint(m.RankId(site=site, stage=0, shard=0), text)
    return text


def signed(scene: Scene, type_: str, subjects: dict[str, Any], **said: Any) -> None:
    statement = s.Statement(type_, subjects, {"run": scene.notary.run, "site": "b", **said})
    scene.notary.checkpoint(m.RankId(site="b", stage=0, shard=0), SIGNERS["b"].sign(statement))


STATE = {"state": ONE, "document": ONE}
SAID = {"stage": 0, "shard": 0, "round": 0, "tick": 0, "served": "yes"}
MODEL = {"stage": 0, "round": 0, "kind": "initial"}


@pytest.mark.parametrize(
    ("kind", "subjects", "said"),
    [
        (s.ROUND, {"state": ONE}, {"stage": 0, "shard": 0, "round": 2}),
        (s.ROUND, STATE, {**SAID, "tick": "soon"}),
        (s.ROUND, {"state": ONE}, SAID),
        (s.ROUND, {**STATE, "steps": "no digest"}, SAID),
        (s.CHECKPOINT, {"state": ONE, "tensors": 5}, MODEL),
        (s.CHECKPOINT, {"state": ONE}, MODEL),
        (s.CHECKPOINT, {"state": ONE, "tensors": ONE}, {**MODEL, "files": ["model"]}),
        (s.CHECKPOINT, {"state": ONE, "tensors": ONE}, {**MODEL, "files": {"a": "b"}}),
        (s.ATTESTATION, {"evidence": "../log.pub"}, {"format": "x"}),
        (s.ATTESTATION, {}, {"format": "x"}),
    ],
)
def test_what_cannot_be_read_is_not_kept(
    scene: Scene, kind: str, subjects: dict[str, Any], said: dict[str, Any]
) -> None:
    before = scene.kinds()
    with pytest.raises(Refused, match="is malformed"):
        signed(scene, kind, subjects, **said)
    assert scene.kinds() == before
    assert scene.course().read == len(before)


def test_a_run_begins_from_one_state(scene: Scene) -> None:
    """It is signed before anything is committed to; the same again does no harm."""
    held(scene, "a", "initial")
    with pytest.raises(Refused, match="a model state of kind 'other'"):
        held(scene, "a", "other")
    scene.exchange()
    for site in "ab":
        with pytest.raises(Refused, match="the run has begun from another state"):
            held(scene, site, "initial", TWO)
    held(scene, "b", "initial")
    scene.reopen()
    with pytest.raises(Refused, match="the run has begun from another state"):
        held(scene, "b", "initial", TWO)
    course = scene.course()
    assert [state.site for state in course.state("initial", 0)] == ["a"]
    assert not [each for each in gaps(course) if "initial" in each]


def test_who_makes_theta_0_may_die_before_anything_is_trained(tmp_path: Path) -> None:
    """The next makes another, and that one counts, whoever comes back."""
    scene = Scene(tmp_path)
    for site, signer in SIGNERS.items():
        scene.driver.enrol(site, record_key=signer.public)
        scene.accept(site)
    held(scene, "a", "initial")
    request = m.EnrolRequest.model_construct(
        site="a", record_key=SIGNERS["a"].public, data_digest=None,
        versions=VERSIONS,
    )  # fmt: skip
    scene.notary.enrolled(request, 2)
    scene.accept("a", incarnation=2)
    held(scene, "b", "initial", TWO)
    for site in SIGNERS:
        scene.driver.ready(site)
    scene.driver.plan(0, "a")
    with pytest.raises(Refused, match="the run begins from the state of b"):
        held(scene, "c", "initial", THREE)
    scene.exchange()
    course = scene.course()
    assert [state.root for state in course.state("initial", 0)] == [TWO]
    assert "stage 0: 2 different initial states are signed" not in gaps(course)


def test_of_several_first_states_it_is_the_first_site_s(tmp_path: Path) -> None:
    """Though another one was quicker, or later and still in time."""
    scene = Scene(tmp_path)
    scene.enrol()
    held(scene, "c", "initial", THREE)
    held(scene, "a", "initial")
    held(scene, "b", "initial", TWO)
    scene.driver.plan(0, "a")
    scene.exchange()
    assert [state.root for state in scene.course().state("initial", 0)] == [ONE]


def test_who_is_not_in_the_first_round_has_not_begun_it() -> None:
    holds = Holds()
    plan = decision(0, 2).plan
    holds.planned(plan.model_copy(update={"members": {"a": plan.members["a"]}}))
    statement = s.Statement(
        s.CHECKPOINT, {"state": ONE, "tensors": ONE},
        {"site": "b", "stage": 0, "kind": "initial", "run": "r"},
    )  # fmt: skip
    from dilocox.record.log.state_statements import State

    assert holds.why_not(State.of(statement, 0), []) == "the run begins without this site"


def test_the_last_state_comes_after_the_flush(scene: Scene) -> None:
    """And from who takes part in it."""
    train = decision(0, 2).plan
    plan = train.model_copy(
        update={"round": 1, "kind": "flush", "fragments": 2, "slots": 0, "delay": 0,
                "members": {name: train.members[name] for name in "ab"}}
    )  # fmt: skip
    with pytest.raises(Refused, match="by those who take part in the flush"):
        held(scene, "a", "final")
    scene.notary.planned(plan)
    with pytest.raises(Refused, match="after the flush"):
        held(scene, "a", "final")
    for fragment in range(2):
        with pytest.raises(Refused, match="after the flush"):
            held(scene, "a", "final")
        key = ExchangeKey.outer(1, 0, fragment)
        scene.notary.decided(Decision(key, 1, ["a", "b"], ["a", "b"], plan))
    with pytest.raises(Refused, match="by those who take part in the flush"):
        held(scene, "c", "final")
    held(scene, "a", "final")
    scene.reopen()
    scene.notary.planned(plan)
    held(scene, "b", "final")
    assert [state.site for state in scene.course().state("final", 0)] == ["a", "b"]


def test_gradients_have_no_flush_to_wait_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path, outer={"method": "allreduce", "inner_steps": 4, "fragments": 1})
    scene.enrol()
    held(scene, "a", "initial")
    train = decision(0, 2).plan
    scene.notary.planned(train.model_copy(update={"round": 1}))
    with pytest.raises(Refused, match="the run has begun from another state"):
        held(scene, "b", "initial", TWO)
    scene.notary.planned(train.model_copy(update={"round": 2, "kind": "flush"}))
    held(scene, "a", "final")
