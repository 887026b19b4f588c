"""The log of a run, written by its coordinator: what gets in, what does not, restarts, resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import digest_of
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.notary import Decision
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.verify.completeness import gaps
from dilocox.record.writer.exchange_statements import commitment, contribution
from dilocox.record.writer.notary import KEY_FILE, TransparencyLogSink, code_digest
from tests.support.coordinator_driver import Driver, run_config
from tests.support.record_scene import KEY, OF_ALL, ONE, SIGNERS, Scene, own_digest


def test_what_was_decided_is_in_the_log(scene: Scene) -> None:
    scene.exchange()
    assert scene.kinds() == [
        s.MANIFEST, *[s.ENROLMENT, s.ACCEPTANCE] * 3, *[s.COMMITMENT] * 3, *[s.CONTRIBUTION] * 3,
        s.STEP,
    ]  # fmt: skip
    course = scene.course()
    step = course.steps[KEY.text]
    assert (step.set, step.owners) == (("a", "b", "c"), ("a", "b", "c"))
    assert step.weights == (1.0, 1.0, 1.0)
    assert step.payloads == OF_ALL
    said = {"code": "admitted", "flags": []}
    decided = s.opened(scene.entries()[-1])[0].predicate
    assert decided["verdicts"] == dict.fromkeys("abc", said)
    assert (decided["aggregation"], decided["shares"]) == ("mean", {})
    assert (step.codec, step.fragments, step.flush) == ("int4+moments", 2, False)
    assert (step.learning_rate, step.momentum) == (0.8, 0.5)
    assert course.run == scene.notary.run
    assert course.manifest["config_digest"] == digest_of(scene.config.shared())
    assert course.manifest["code"] == code_digest()
    assert (scene.folder / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_site_that_is_left_out_is_not_in_the_step(scene: Scene) -> None:
    scene.begin()
    for site in "abc":
        scene.vote(site, contributes=site != "b")
    step = scene.course().steps[KEY.text]
    assert step.set == ("a", "c")
    assert set(step.payloads) == {"a/0", "c/0"}
    assert step.weights == (1.0, 1.0)
    # Its text will be in the model: it has committed, and keeps all of it in its residual.
    assert list(step.said["ranges"]) == list(step.said["spaces"]) == ["a", "b", "c"]


def test_what_is_left_out_without_error_feedback_trains_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, compression={"error_feedback": False})
    scene.enrol()
    scene.driver.plan(0, "a")
    scene.begin()
    for site in "abc":
        scene.vote(site, contributes=site != "b")
    assert list(scene.course().steps[KEY.text].said["ranges"]) == ["a", "c"]


def test_gradients_are_not_recorded(tmp_path: Path) -> None:
    scene = Scene(tmp_path, outer={"method": "allreduce", "inner_steps": 4, "fragments": 1})
    scene.enrol()
    scene.driver.plan(0, "a")
    key = ExchangeKey.gradient(0, 0, 0)
    scene.driver.begin(key, "a")
    for site in "abc":
        scene.driver.vote(key, site, held=list("abc"), digests={site: ONE})
    assert scene.driver.core.state.exchanges[key.text].decision == ["a", "b", "c"]
    assert scene.kinds() == [s.MANIFEST, *[s.ENROLMENT, s.ACCEPTANCE] * 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"statement": None}, "is not signed"),
        ({"statement": "rubbish"}, "not a DSSE envelope"),
        ({"signer": "b"}, "not one of key"),
        ({"run": "0" * 32}, "is of run"),
        ({"digest": "2" * 64}, "signed contribution does not match outer/0/0/0"),
        ({"attempt": 2}, "does not match"),
        ({"key": ExchangeKey.outer(1, 0, 0)}, "does not match"),
        ({"site": "b", "signer": "a"}, "does not match"),
    ],
)
def test_a_payload_counts_only_with_its_signature(
    scene: Scene, changes: dict[str, Any], reason: str
) -> None:
    scene.driver.begin(KEY, "a")
    text = changes["statement"] if "statement" in changes else scene.signed(
        **{"site": "a", **changes}
    )  # fmt: skip
    with pytest.raises(Refused, match=reason):
        scene.vote("a", statement=text)
    assert scene.driver.core.state.exchanges[KEY.text].votes == {}
    assert s.CONTRIBUTION not in scene.kinds()


@pytest.mark.parametrize("changes", [{"shard": False}, {"attempt": True}, {"round": False}])
def test_true_is_not_one(scene: Scene, changes: dict[str, Any]) -> None:
    """To Python they are equal. Readers make other names of them, and so did a restart."""
    scene.begin()
    rank = m.RankId(site="a", stage=0, shard=0)
    said = contribution(scene.notary.run, rank, KEY, 1, own_digest("a"))
    odd = replace(said, predicate={**said.predicate, **changes})
    with pytest.raises(Refused, match="its signed contribution does not match outer/0/0/0"):
        scene.vote("a", statement=SIGNERS["a"].sign(odd))
    key = ExchangeKey.outer(0, 0, 1)
    said = commitment(scene.notary.run, rank, key, ONE, ONE)
    changes = {name: value for name, value in changes.items() if name in said.predicate}
    if changes:
        odd = replace(said, predicate={**said.predicate, **changes})
        with pytest.raises(Refused, match="its signed commitment does not match outer/0/0/1"):
            scene.driver.begin(key, "a", commitment=SIGNERS["a"].sign(odd))
    scene.reopen()


def test_a_site_needs_a_key(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with pytest.raises(Refused, match="no key for the run's record"):
        scene.driver.enrol("a")


def test_nothing_is_asked_of_sites_where_nothing_is_recorded(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config())
    driver.start()
    assert driver.core.witness.run == ""
    driver.plan(0, "a")
    driver.begin(KEY, "a")
    for site in "abc":
        driver.vote(KEY, site, held=list("abc"), digests={site: own_digest(site)})
    assert driver.core.state.exchanges[KEY.text].decision == ["a", "b", "c"]


def test_the_same_vote_again_is_said_once(scene: Scene) -> None:
    """A reply was lost on its way, or the coordinator died between log and record."""
    scene.begin()
    rank, digest = m.RankId(site="a", stage=0, shard=0), own_digest("a")
    scene.notary.contribution(rank, KEY, 1, digest, scene.signed("a", digest=digest))
    for site in "aabbcc":
        scene.vote(site)
    assert scene.kinds().count(s.CONTRIBUTION) == 3


def test_a_restart_says_nothing_twice(scene: Scene) -> None:
    scene.exchange()
    before, run = scene.kinds(), scene.notary.run
    scene.reopen()
    assert scene.notary.run == run
    assert scene.kinds() == before
    scene.exchange(ExchangeKey.outer(0, 0, 1))
    assert len(scene.course().steps) == 2


def test_a_decision_said_again_without_its_owners_is_no_news(scene: Scene) -> None:
    """A stopped run is opened again to be resumed: its sites have finished by then."""
    scene.exchange()
    before = scene.kinds()
    scene.notary.decided(replace(scene.last_decision(), owners=[]))
    assert scene.kinds() == before
    assert scene.course().steps[KEY.text].payloads == OF_ALL


def test_a_restart_says_what_was_not_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator dies after it has logged a decision, before the record has it."""
    monkeypatch.setattr(TransparencyLogSink, "decided", lambda self, decision: None)
    scene.exchange()
    assert s.STEP not in scene.kinds()
    monkeypatch.undo()
    scene.reopen()
    assert scene.course().steps[KEY.text].payloads == OF_ALL


def test_a_log_is_not_gone_on_with_under_a_new_key(scene: Scene) -> None:
    scene.notary.close()
    (scene.folder / KEY_FILE).unlink()
    with pytest.raises(RecordError, match="put it back"):
        TransparencyLogSink.open(scene.config, scene.folder, print)


def decision(round_: int, tick: int, chosen: str = "abc") -> Decision:
    plan = m.RoundPlan.model_validate(
        {
            "round": round_, "kind": "train", "first_tick": tick - 2, "first_step": 0,
            "members": {n: {"weight": 1.0, "batch": 1, "ranges": [], "space": "shared"}
                        for n in "abc"},
            "inner_steps": 4, "slots": 4, "fragments": 2, "delay": 2, "overlap": "keep",
            "keep": 1.0, "learning_rate": 0.8, "momentum": 0.5, "codec": "int4",
            "residual_decay": 1.0, "exchange": "gather", "checkpoint": False, "evaluate": False,
            "last": False,
        }
    )  # fmt: skip
    return Decision(ExchangeKey.outer(round_, 0, 0), 1, list(chosen), list("abc"), plan)


def test_a_resume_leaves_a_course_behind(scene: Scene) -> None:
    """What had its boundary by the resume's tick stays; of what is decided again, the later."""
    notary = scene.notary
    for round_, tick in ((0, 2), (1, 6), (2, 10)):
        notary.decided(decision(round_, tick))
    notary.resumed(1, 6)
    notary.decided(decision(1, 6, "ab"))
    course = scene.course()
    assert {key: step.set for key, step in course.steps.items()} == {
        "outer/0/0/0": ("a", "b", "c"), "outer/1/0/0": ("a", "b"),
    }  # fmt: skip


def test_what_is_decided_again_after_a_resume_and_a_restart_is_said(scene: Scene) -> None:
    """Though the same was decided in the course that was left."""
    notary = scene.notary
    notary.decided(decision(1, 6))
    notary.resumed(1, 2)
    scene.reopen()
    scene.notary.decided(decision(1, 6))
    assert scene.kinds()[-2:] == [s.RESUME, s.STEP]
    assert list(scene.course().steps) == ["outer/1/0/0"]


def test_a_state_is_signed_by_the_rank_that_holds_it(scene: Scene) -> None:
    def said(**changes: Any) -> m.StateRequest:
        predicate = {"run": scene.notary.run, "site": "a", "stage": 0, "round": 0,
                     "kind": "initial", "files": {}, **changes}  # fmt: skip
        statement = s.Statement(s.CHECKPOINT, {"state": ONE, "tensors": ONE}, predicate)
        text = SIGNERS["a"].sign(statement)
        return m.StateRequest(rank=m.RankId(site="a", stage=0, shard=0), statement=text)

    scene.driver.core.witness.state(said())
    for changes in ({"stage": 1}, {"site": "b"}, {"run": "other"}):
        with pytest.raises(Refused):
            scene.driver.core.witness.state(said(**changes))
    assert [state.kind for state in scene.course().states] == ["initial"]


def plan_of(round_: int, tick: int) -> m.RoundPlan:
    return decision(round_, tick).plan


def test_plans_are_said_where_rounds_can_be_repeated(tmp_path: Path) -> None:
    scene = Scene(tmp_path, record={"states_every": 2})
    scene.enrol()
    scene.driver.plan(0, "a")
    course = scene.course()
    assert list(course.plans) == [0]
    assert set(course.plans[0]["members"]) == {"a", "b", "c"}
    assert course.plans[0]["members"]["a"]["ranges"]
    before = scene.kinds()
    scene.reopen()
    assert scene.kinds() == before, "a restart says nothing twice"
    scene.notary.resumed(0, 0)
    scene.notary.planned(plan_of(0, 2))
    assert scene.kinds()[-2:] == [s.RESUME, s.PLAN]


def test_plans_are_not_said_elsewhere(scene: Scene) -> None:
    assert s.PLAN not in scene.kinds()


def test_the_first_state_of_a_round_counts(scene: Scene) -> None:
    """Signed again only counts after a resume that goes back to it; then it keeps the steps."""

    def began(digest: str, round_: int, tick: int, steps: bool, **changes: Any) -> None:
        subjects = {"state": digest * 64, "document": digest * 64}
        if steps:
            subjects["steps"] = digest * 64
        rank = m.RankId(site="a", stage=0, shard=0)
        said = {"run": scene.notary.run, "site": "a", "stage": 0, "shard": 0, "round": round_,
                "tick": tick, "served": "yes", **changes}  # fmt: skip
        text = SIGNERS["a"].sign(s.Statement(s.ROUND, subjects, said))
        scene.driver.core.witness.state(m.StateRequest(rank=rank, statement=text))

    def documents() -> dict[int, tuple[str, str | None]]:
        rounds = scene.course().rounds
        scene.reopen()
        return {
            key[0]: (state.document[0], state.steps and state.steps[0])
            for key, state in rounds.items()
        }

    began("1", 1, 4, True)
    began("2", 1, 4, True)
    began("3", 2, 8, True)
    assert documents() == {1: ("1", "1"), 2: ("3", "3")}
    scene.notary.resumed(1, 4)
    assert documents() == {1: ("1", "1")}
    began("4", 1, 4, False)
    began("5", 1, 4, False)
    assert documents() == {1: ("4", "1")}
    for changes in ({"shard": 1}, {"stage": 1}, {"site": "b"}):
        with pytest.raises(Refused):
            began("6", 3, 12, False, **changes)


def test_gaps_are_named(scene: Scene) -> None:
    notary = scene.notary
    notary.decided(decision(0, 2))
    notary.decided(decision(2, 10))
    found = gaps(scene.course())
    assert "stage 0: no outer step of round 1" in found
    assert "stage 0 fragment 1: no outer step of round 0" in found
    assert "outer/0/0/0: its payloads are not those of its contribution set" in found
    assert "stage 0: 0 different initial states are signed" in found


def test_fragments_that_are_not_those_of_one_number_are_gaps(scene: Scene) -> None:
    """A round's fragments are as many as its steps say, and no more than there are pieces."""
    scene.notary.decided(decision(0, 2))
    course = scene.course()
    (step,) = course.steps.values()
    other = replace(step, key=KEY._replace(fragment=1), fragments=1)
    course.steps[other.key.text] = other
    assert [each for each in gaps(course) if "do not agree" in each] == [
        "stage 0: the outer steps of round 0 do not agree on the number of fragments"
    ]
    course.plans = {0: {"fragments": 1}}
    course.steps = {KEY.text: step}
    assert "outer/0/0/0: 2 fragments, where the plan has 1" in gaps(course)
    course.plans = {}
    course.steps = {KEY.text: replace(step, fragments=3)}
    assert "outer/0/0/0: 3 fragments, where a stage has 2 pieces" in gaps(course)
    course.steps = {KEY.text: replace(step, fragments=0)}
    assert "outer/0/0/0: 0 fragments, where a stage has 2 pieces" in gaps(course)
    far = replace(step, key=KEY._replace(fragment=1), fragments=1)
    course.steps = {KEY.text: replace(step, fragments=1), far.key.text: far}
    assert "outer/0/0/1: no such fragment" in gaps(course)
    assert not [each for each in gaps(course) if "no outer step" in each]
    # Nothing at all, and a round far beyond what there is.
    course.steps = {}
    assert gaps(course) == ["no outer step is signed"]
    lone = replace(step, key=KEY._replace(round=10**9))
    course.steps = {lone.key.text: lone}
    assert [each for each in gaps(course) if "no outer step" in each] == [
        "stage 0: no outer step of round 0"
    ]
