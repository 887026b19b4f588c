"""After a resume a site commits again to what it had committed to before, or is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.notary import Decision
from dilocox.errors import RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.packed import packed_step
from dilocox.record.log.recommitments import Base, Recommitments
from dilocox.record.log.step_statements import Commitment, Step
from dilocox.record.verify.completeness import broken_commitments
from dilocox.record.verify.counts import told_commitments, told_complete
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.notary import outer_step
from tests.support.record_scene import KEYS, SIGNERS, Scene, own_digest

TWO = "2" * 64
FIRST, SECOND = ExchangeKey.outer(1, 0, 0), ExchangeKey.outer(1, 0, 1)


def resumed(tmp_path: Path, **sections: Any) -> Scene:
    """Round 1 of three sites is over when the run goes back to its first slot: all that was sent
    in it is known."""
    scene = Scene(tmp_path, **sections)
    scene.enrol()
    driver = scene.driver
    driver.plan(0, "a")
    for fragment in (0, 1):
        scene.exchange(ExchangeKey.outer(0, 0, fragment))
    driver.plan(1, "a")
    for site in "abc":
        driver.round_done(site, 0)
    for site in "abc":
        driver.write_checkpoint(site, 5, 1, 1)
    scene.exchange(FIRST)
    scene.exchange(SECOND)
    driver.core.resume()
    for site, key in KEYS.items():
        driver.enrol(site, key)
        scene.accept(site)
    for site in SIGNERS:
        driver.ready(site)
    driver.plan(1, "a")
    return scene


def exchange(scene: Scene, key: ExchangeKey, other: str = "") -> m.VoteReply:
    """All as before, but for these sites."""
    digest = {site: TWO[:-1] + site if site in other else own_digest(site, key) for site in "abc"}
    for site in "abc":
        values = {"values": TWO} if site in other else {}
        scene.commit(site, key, payload=digest[site], **values)
    for site in "abc":
        said = scene.signed(site, key, digest=digest[site])
        reply = scene.vote(site, key, digests={site: digest[site]}, statement=said)
    return reply


def flags(scene: Scene, key: ExchangeKey) -> dict[str, tuple[str, list[str]]]:
    found = scene.driver.core.state.exchanges[key.text].verdicts
    return {site: (each.code, list(each.flags)) for site, each in found.items()}


HONEST = ("admitted", list[str]())


def test_who_commits_to_the_same_is_as_before(tmp_path: Path) -> None:
    scene = resumed(tmp_path, admission={"aggregation": "clip"})
    for key in (FIRST, SECOND):
        exchange(scene, key)
        assert flags(scene, key) == dict.fromkeys("abc", HONEST)
    course = scene.course()
    assert course.recommitments.found == set()
    assert "recommitted" not in told_commitments(course)
    assert told_complete(course).endswith("; with 1 resume, to slot 5")


def test_who_commits_to_another_is_flagged_and_named(tmp_path: Path) -> None:
    scene = resumed(tmp_path)
    exchange(scene, FIRST, "c")
    assert flags(scene, FIRST) == {
        **dict.fromkeys("ab", HONEST),
        "c": ("admitted", ["recommitted"]),
    }
    course = scene.course()
    assert course.steps[FIRST.text].set == ("a", "b", "c")
    assert broken_commitments(course) == []
    assert told_commitments(course).endswith(
        "recommitted after a resume, when the site could know the others': c to outer/1/0/0"
    )


def test_it_does_not_count_where_contributions_are_compared(tmp_path: Path) -> None:
    """Not after a restart either. What was seen is of no use once another decision has landed: then
    all commit to something else."""
    scene = resumed(tmp_path, admission={"aggregation": "clip"})
    scene.reopen()
    exchange(scene, FIRST, "c")
    assert flags(scene, FIRST)["c"] == ("recommitted", ["recommitted"])
    scene.reopen()
    exchange(scene, SECOND, "abc")
    assert flags(scene, SECOND) == dict.fromkeys("abc", HONEST)
    course = scene.course()
    assert course.steps[FIRST.text].set == ("a", "b")
    assert course.recommitments.found == {(FIRST.text, "c", 0)}
    step = course.steps[FIRST.text]
    verdicts = {"c": {"code": "admitted", "flags": []}}
    said = {**step.said, "verdicts": verdicts}
    course.steps[FIRST.text] = replace(step, set=("a", "b", "c"), said=said)
    with pytest.raises(RecordError, match="c has committed anew after a resume"):
        told_commitments(course)


def test_if_most_do_the_machines_are_others_than_before(tmp_path: Path) -> None:
    scene = resumed(tmp_path, admission={"aggregation": "clip"})
    exchange(scene, FIRST, "bc")
    assert {site: code for site, (code, _) in flags(scene, FIRST).items()} == dict.fromkeys(
        "abc", "admitted"
    )
    course = scene.course()
    assert {site for _, site, _ in course.recommitments.found} == {"b", "c"}
    told_commitments(course)


def test_a_second_resume_asks_for_the_first_commitment(tmp_path: Path) -> None:
    """And what was chosen after the first one is not what counts from then on."""
    scene = resumed(tmp_path)
    exchange(scene, FIRST, "c")
    scene.notary.resumed(1, 5)
    plan = scene.driver.core.state.plans[1]
    rank = m.RankId(site="c", stage=0, shard=0)
    course = scene.course()
    places = {(FIRST.text, site, 0): course.commitments[FIRST.text, site, 0] for site in "abc"}
    base = Base.of_plan(FIRST, plan, 1)
    again = {site: course.recommitments.again((FIRST.text, site, 0), places[FIRST.text, site, 0],
                                              base) for site in "abc"}  # fmt: skip
    assert again == {"a": False, "b": False, "c": True}
    assert course.recommitments.found == set(), "nothing of it is decided any more"
    assert not scene.notary.recommitted(rank, FIRST, plan), "nothing is committed to yet"


def step(key: ExchangeKey, tick: int, chosen: str = "abc", **said: Any) -> Step:
    ranges = {site: [[0, 4]] for site in "abc"}
    plan = {"first_tick": 4 * key.round, "slots": 4, "inner_steps": 4, "fragments": 2,
            "members": list("abc"), "ranges": ranges, **said}  # fmt: skip
    return Step(
        key, False, 1, tick, tuple(chosen), tuple(chosen), (1.0,) * len(chosen), "int4", "gather",
        0.8, 0.5, 2, {f"{site}/0": site * 64 for site in chosen}, delay=2, said=plan,
    )  # fmt: skip


def bound(*keys: ExchangeKey, steps: tuple[Step, ...] = ()) -> Recommitments:
    found = Recommitments()
    said = Commitment("1" * 64, None, 0)
    commitments = {(key.text, site, 0): said for key in keys for site in "abc"}
    found.resumed(1, commitments, {each.key.text: each for each in steps})
    return found


OTHER = Commitment(TWO, None, 9)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (step(FIRST, 6), True),
        (step(FIRST, 6, members=["a", "b"]), False),
        (step(FIRST, 6, inner_steps=8), False),
        (step(FIRST, 6, ranges={"a": [[4, 4]]}), False),
        (step(FIRST, 6, ranges={"b": [[4, 4]]}), True),
        (step(FIRST, 6, spaces={"a": "site/a"}), False),
        (step(FIRST, 6, weights={"a": 2.0}), False),
        (step(FIRST, 6, weights={"b": 2.0}), True),
    ],
)
def test_other_members_or_ranges_make_another_contribution(now: Step, expected: bool) -> None:
    place, sites = (FIRST.text, "a", 0), "abc"
    old = step(FIRST, 6, spaces=dict.fromkeys(sites, "shared"), weights=dict.fromkeys(sites, 1.0))
    found = bound(FIRST, steps=(old,))
    assert found.again(place, OTHER, Base.of_step(now)) is expected
    found.stepped(now, {place: OTHER}, 1)
    assert found.found == ({place} if expected else set())


PLAN = m.RoundPlan(
    round=1, kind="train", first_tick=4, first_step=4,
    members={
        site: m.MemberPlan(weight=1.0, batch=1, ranges=[(0, 4)], space="shared") for site in "abc"
    },
    inner_steps=4, slots=4, fragments=2, delay=2, overlap="keep", keep=0.5, learning_rate=0.8,
    momentum=0.5, codec="int4", residual_decay=0.9, residual_view=0.1, exchange="gather",
    checkpoint=False, evaluate=False, last=False,
)  # fmt: skip
AS_BEFORE = {"first_step", "reason", "estimate", "checkpoint", "evaluate", "last"}
"""Fields of a plan that change no contribution, or only together with others."""
FIELDS = sorted(m.RoundPlan.model_fields.keys() - {"round"})


def changed(name: str) -> m.RoundPlan:
    """The plan with another value of one field, whatever its type is."""
    value = getattr(PLAN, name)
    kinds: dict[type, Any] = {bool: not value, type(None): 1, dict: {"a": PLAN.members["a"]}}
    other = kinds[type(value)] if type(value) in kinds else value + type(value)(1)
    return PLAN.model_copy(update={"kind": "flush"} if name == "kind" else {name: other})


def decided(plan: m.RoundPlan) -> Step:
    """The statement of the coordinator on the first exchange of a plan, as a reader has it."""
    said = outer_step(Decision(FIRST, 1, ("a",), ("a",), plan), 1, ["a"])
    return packed_step(Step.of(s.Statement(s.STEP, {"a/0": "1" * 64}, said)))


@pytest.mark.parametrize("name", FIELDS)
def test_another_plan_makes_another_contribution(name: str) -> None:
    """All fields of a plan, those that are new as well: who adds one says what it changes."""
    place, now, expected = (FIRST.text, "a", 0), changed(name), name in AS_BEFORE
    found = bound(FIRST, steps=(decided(PLAN),))
    for base in (Base.of_step(decided(now)), Base.of_plan(FIRST, now, 1)):
        assert not found.again(place, Commitment("1" * 64, None, 9), base)
        assert found.again(place, OTHER, base) is expected
    found.stepped(decided(now), {place: OTHER}, 1)
    assert found.found == ({place} if expected else set())


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("kind", "members")])
def test_another_plan_frees_what_is_made_after_it_has_landed(name: str) -> None:
    """The parameters from which the next contributions are made are others, too."""
    later = step(ExchangeKey.outer(2, 0, 0), 10)
    found = bound(FIRST, later.key, steps=(decided(PLAN), later))
    place, base = (later.key.text, "a", 0), Base.of_step(later)
    assert found.again(place, OTHER, base)
    found.stepped(decided(changed(name)), {}, 1)
    assert found.again(place, OTHER, base) is (name in AS_BEFORE)


def test_a_decision_that_has_not_landed_any_more_frees_what_comes_after_it() -> None:
    """Its delay is longer than before the resume: it had landed there."""
    later = step(SECOND, 8)
    found = bound(FIRST, SECOND, steps=(step(FIRST, 6, delay=2), later))
    now = replace(step(FIRST, 6, delay=4), delay=4)
    found.stepped(now, {}, 1)
    assert not found.again((SECOND.text, "a", 0), OTHER, Base.of_step(later))


@pytest.mark.parametrize(("members", "expected"), [("abc", True), ("ab", False), ("abcd", False)])
def test_what_was_never_decided_is_bound_if_all_had_committed(members: str, expected: bool) -> None:
    """Else nobody had sent a payload."""
    base = Base.of_step(step(FIRST, 6, members=list(members)))
    assert bound(FIRST).again((FIRST.text, "a", 0), OTHER, base) is expected


@pytest.mark.parametrize(
    ("key", "tick", "expected"),
    [
        (ExchangeKey.outer(1, 0, 0), 6, True),
        (ExchangeKey.outer(1, 1, 0), 5, True),
        (ExchangeKey.outer(1, 0, 1), 8, False),
        (ExchangeKey.outer(2, 0, 0), 7, False),
        (ExchangeKey.outer(2, 1, 1), 7, True),
        (ExchangeKey.outer(3, 1, 0), 7, False),
    ],
)
def test_another_decision_frees_what_is_made_after_it_has_landed(
    key: ExchangeKey, tick: int, expected: bool
) -> None:
    """The decision at slot 6 lands at slot 8, or at the next boundary of its pieces."""
    old = (step(FIRST, 6), step(key, tick))
    found = bound(FIRST, key, steps=old)
    place = (key.text, "a", 0)
    assert found.again(place, OTHER, Base.of_step(step(key, tick)))
    found.stepped(step(FIRST, 6, "ab"), {}, 1)
    assert found.again(place, OTHER, Base.of_step(step(key, tick))) is expected


def test_nothing_is_kept_of_rounds_that_are_over() -> None:
    found = bound(FIRST, steps=(step(FIRST, 6),))
    found.forget(2)
    assert not found.again((FIRST.text, "a", 0), OTHER, Base.of_step(step(FIRST, 6)))


def test_a_course_without_a_resume_has_none(scene: Scene) -> None:
    scene.exchange()
    course: RunHistory = scene.course()
    assert "recommitted" not in told_commitments(course)
    assert "resume" not in told_complete(course)
