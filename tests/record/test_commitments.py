"""Commitments: each site waits for all, and only what was committed to counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import ExchangeError
from dilocox.record.log import statements as s
from dilocox.record.log.statements import Signer
from dilocox.record.verify.completeness import broken_commitments, gaps
from dilocox.record.writer.exchange_statements import commitment
from dilocox.record.writer.notary import TransparencyLogSink
from tests.support.coordinator_driver import run_config
from tests.support.record_scene import KEY, ONE, SIGNERS, Scene, own_digest
from tests.support.served_run import Run


def test_nobody_begins_before_all_have_committed(tmp_path: Path) -> None:
    config = run_config("ab", run={"folder": str(tmp_path / "run")})
    notary = TransparencyLogSink.open(config, tmp_path / "coordinator", print)
    run = Run(tmp_path / "coordinator", notary=notary)

    def signed(site: str) -> str:
        rank = m.RankId(site=site, stage=0, shard=0)
        said = commitment(notary.run, rank, KEY, "1" * 64, "2" * 64)
        return Signer.from_hex(run.identities[site].record_key).sign(said)

    try:
        clients = run.start()
        clients["a"].plan(0)
        with pytest.raises(ExchangeError, match=r"after 0\.05 s; waited for b stage 0 shard 0"):
            clients["a"].begin(KEY, signed("a"), limit=0.05)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(clients["a"].begin, KEY, signed("a"))
            # Asking for the attempt commits to nothing, and waits for nobody.
            assert clients["b"].attempt(KEY) == 1
            assert not waiting.done()
            assert clients["b"].begin(KEY, signed("b")).waiting_for == []
            assert waiting.result(20).attempt == 1
    finally:
        run.close()
        notary.close()


def test_nobody_goes_on_before_all_have_committed(scene: Scene) -> None:
    """Ranks that wait, a restart of the coordinator, a rank that asks again: nothing said twice."""
    assert scene.commit("a").waiting_for == ["b stage 0 shard 0", "c stage 0 shard 0"]
    assert scene.commit("b").waiting_for == ["c stage 0 shard 0"]
    scene.reopen()
    assert scene.commit("a").waiting_for == ["c stage 0 shard 0"]
    assert scene.commit("c").waiting_for == []
    assert scene.commit("a").waiting_for == []
    assert scene.kinds().count(s.COMMITMENT) == 3


def test_who_does_not_commit_is_as_good_as_absent(scene: Scene) -> None:
    """A site that begins and keeps its commitment back is late, and late is left behind."""
    scene.commit("a")
    scene.commit("b")
    scene.driver.begin(KEY, "c")
    core = scene.driver.core
    voters = core.state.voters(core.state.exchanges[KEY.text])
    awaited = core.arrivals.awaited(KEY.text, voters)
    assert awaited is not None
    assert awaited[1] == ["c"]
    scene.commit("c")
    assert core.arrivals.awaited(KEY.text, voters) is None


def test_a_site_that_goes_is_not_waited_for(scene: Scene) -> None:
    scene.commit("a")
    scene.commit("b")
    scene.driver.leave("c")
    reply = scene.commit("a")
    assert (reply.waiting_for, reply.attempt) == ([], 2)
    assert [member.site for member in reply.members] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"signer": "b"}, "not one of key"),
        ({"run": "0" * 32}, "is of run"),
        ({"key": ExchangeKey.outer(1, 0, 0)}, "signed commitment does not match outer/0/0/0"),
        ({"rank": m.RankId(site="a", stage=0, shard=1)}, "does not match"),
        ({"payload": None}, "does not match"),
    ],
)
def test_a_commitment_is_its_rank_s_own(scene: Scene, changes: dict[str, Any], reason: str) -> None:
    scene.driver.begin(KEY, "a")
    key = changes.pop("key", KEY)
    text = SIGNERS[changes.pop("signer", "a")].sign(
        commitment(**{"run": scene.notary.run, "rank": m.RankId(site="a", stage=0, shard=0),
                      "key": key, "values": ONE, "payload": ONE, **changes}))  # fmt: skip
    with pytest.raises(Refused, match=reason):
        scene.driver.begin(KEY, "a", commitment=text)
    assert s.COMMITMENT not in scene.kinds()


def test_nobody_commits_twice(scene: Scene) -> None:
    """Whoever has seen the others' commitments is not to choose another contribution."""
    scene.commit("a")
    with pytest.raises(Refused, match="has committed to another contribution to outer/0/0/0"):
        scene.commit("a", values=ONE)


@pytest.mark.parametrize("committed", [True, False])
def test_a_payload_that_was_not_committed_to_does_not_count(scene: Scene, committed: bool) -> None:
    """Another one, or none at all: a reason code in the record, and nobody else is harmed."""
    for site in "abc" if committed else "ac":
        scene.commit(site)
    for site in "bac":  # who has not committed first: the others have waited for it
        digest = ONE if site == "b" else own_digest(site)
        signed = scene.signed(site, digest=digest)
        scene.vote(site, digests={site: digest}, statement=signed)
    decided = s.opened(scene.entries()[-1])[0].predicate
    assert {site: said["code"] for site, said in decided["verdicts"].items()} == {
        "a": "admitted", "b": "uncommitted", "c": "admitted",
    }  # fmt: skip
    course = scene.course()
    assert course.steps[KEY.text].set == ("a", "c")
    assert broken_commitments(course) == []


def verdicts(scene: Scene) -> dict[str, str]:
    said = s.opened(scene.entries()[-1])[0].predicate["verdicts"]
    return {site: verdict["code"] for site, verdict in said.items()}


def sound(scene: Scene) -> tuple[str, ...]:
    """The contribution set, of which nothing is missing and nothing out of order."""
    course = scene.course()
    assert broken_commitments(course) == []
    assert [each for each in gaps(course) if each.startswith(KEY.text)] == []
    return course.steps[KEY.text].set


@pytest.mark.parametrize("begins", [True, False])
def test_a_vote_without_a_payload_does_not_count(scene: Scene, begins: bool) -> None:
    """Were it taken, the others would send theirs, and its own would count unsigned."""
    scene.commit("a")
    scene.commit("b")
    if begins:
        scene.driver.begin(KEY, "c")
    for more in ({}, {"statement": "rubbish"}, {"digests": {"a": own_digest("a")}}):
        with pytest.raises(Refused, match="c stage 0 shard 0: its payload of outer/0/0/0 is not"):
            scene.driver.vote(KEY, "c", held=list("abc"), **more)
    assert scene.driver.core.state.exchanges[KEY.text].votes == {}
    assert scene.commit("a").waiting_for == ["c stage 0 shard 0"]
    scene.commit("c")
    for site in "abc":
        scene.vote(site)
    assert sound(scene) == ("a", "b", "c")


def test_who_brings_nothing_needs_no_payload(scene: Scene) -> None:
    """It keeps nobody waiting, and it is not said to have committed to anything."""
    scene.commit("a")
    scene.commit("b")
    scene.driver.vote(KEY, "c", held=list("abc"), contributes=False)
    assert not scene.driver.core.state.exchanges[KEY.text].votes["c", 0, 0].committed
    assert scene.commit("a").waiting_for == []
    for site in "ab":
        scene.vote(site)
    assert verdicts(scene) == {"a": "admitted", "b": "admitted", "c": "withdrawn"}
    assert sound(scene) == ("a", "b")


@pytest.mark.parametrize("contributes", [True, False])
def test_who_votes_without_a_commitment_gives_none_later(scene: Scene, contributes: bool) -> None:
    """The others have sent theirs by then: what it would commit to it may have seen."""
    scene.commit("a")
    scene.commit("b")
    fields = {} if contributes else {"contributes": False, "digests": {}, "statement": None}
    scene.vote("c", **fields)
    assert scene.commit("a").waiting_for == []
    scene.commit("c")
    scene.reopen()
    scene.commit("c")
    scene.driver.vote(KEY, "c", broken=True, failed=["a"])
    scene.reopen()
    for site in "abc":
        assert scene.commit(site).waiting_for == [], "nor is it waited for in the next attempt"
    assert s.opened(scene.entries()[-1])[0].predicate["site"] == "b", "c's is not in the log"
    for site in "abc":
        signed = scene.signed(site, attempt=2, digest=own_digest(site))
        scene.vote(site, attempt=2, statement=signed)
    assert verdicts(scene)["c"] == "uncommitted"
    assert sound(scene) == ("a", "b")


def test_a_vote_before_all_have_committed_does_not_count(scene: Scene) -> None:
    """Nobody honest can vote then. In the log it would make the others' commitments look late."""
    scene.commit("b")
    scene.vote("b")
    assert s.CONTRIBUTION not in scene.kinds()
    for site in "ac":
        scene.commit(site)
    for site in "ac":
        scene.vote(site)
    assert verdicts(scene) == {"a": "admitted", "b": "uncommitted", "c": "admitted"}
    assert sound(scene) == ("a", "c")


def test_votes_on_an_average_name_no_payload(tmp_path: Path) -> None:
    """In `reduce` the second vote of every site is about the mean."""
    scene = Scene(tmp_path, outer={"exchange": "reduce"})
    scene.enrol()
    scene.driver.plan(0, "a")
    for site in "abc":
        scene.commit(site, payload=None)
    for site in "abc":
        scene.vote(site)
    for site in "abc":
        scene.driver.vote(KEY, site, held=list("abc"), phase="done")
    assert sound(scene) == ("a", "b", "c")


def test_broken_commitments_are_named(scene: Scene) -> None:
    scene.exchange()
    course = scene.course()
    assert broken_commitments(course) == []
    where = (KEY.text, "b", 0)
    said = course.commitments[where]
    for changes, problem in (
        ({"number": course.votes[KEY.text, 1] + 1}, "committed only after payloads were sent"),
        ({"payload": ONE}, "committed to another payload"),
    ):
        course.commitments[where] = replace(said, **changes)
        (found,) = broken_commitments(course)
        assert found == f"outer/0/0/0: b has {problem}"
    del course.commitments[where]
    assert broken_commitments(course) == ["outer/0/0/0: b has not committed to its contribution"]


def test_votes_of_every_attempt_count(scene: Scene) -> None:
    """Payloads were sent in the first one, too; of votes before a resume nothing follows."""
    scene.begin()
    for site in "ab":
        scene.vote(site)
    scene.driver.vote(KEY, "c", broken=True, failed=["a"])
    for site in "abc":
        signed = scene.signed(site, attempt=2, digest=own_digest(site))
        scene.vote(site, attempt=2, statement=signed)
    course = scene.course()
    assert (course.steps[KEY.text].attempt, broken_commitments(course)) == (2, [])
    first, second = course.votes[KEY.text, 1], course.votes[KEY.text, 2]
    where = (KEY.text, "b", 0)
    course.commitments[where] = replace(course.commitments[where], number=first + 1)
    assert first + 1 < second
    problem = f"{KEY.text}: b has committed only after payloads were sent"
    assert broken_commitments(course) == [problem]
    course.resumes.append(first)
    assert broken_commitments(course) == []
    del course.votes[KEY.text, 2]
    assert problem in broken_commitments(course)
    course.resumes.clear()
    assert problem in broken_commitments(course)


def test_votes_on_what_a_resume_has_abandoned_are_forgotten(scene: Scene) -> None:
    scene.exchange()
    scene.notary.resumed(0, 0)
    assert scene.course().votes == {}


def test_after_a_resume_sites_commit_again(scene: Scene) -> None:
    scene.exchange()
    scene.notary.resumed(0, 0)
    rank = m.RankId(site="a", stage=0, shard=0)
    again = commitment(scene.notary.run, rank, KEY, ONE, own_digest("a"))
    assert scene.notary.committed(rank, KEY, SIGNERS["a"].sign(again), bound=True)
    course = scene.course()
    assert course.commitments[KEY.text, "a", 0].values == again.subjects["values"]


def test_a_commitment_of_another_s_is_worth_nothing(scene: Scene) -> None:
    """Whoever copies it, and then the payload behind it, has committed to something else."""
    honest = commitment(scene.notary.run, m.RankId(site="a", stage=0, shard=0), KEY, ONE,
                        own_digest("a"))  # fmt: skip
    said = commitment(scene.notary.run, m.RankId(site="b", stage=0, shard=0), KEY, "", None)
    copied = SIGNERS["b"].sign(replace(said, subjects=honest.subjects))
    scene.driver.begin(KEY, "a", commitment=SIGNERS["a"].sign(honest))
    scene.driver.begin(KEY, "b", commitment=copied)
    scene.commit("c")
    for site in "abc":
        digest = own_digest("c" if site == "c" else "a")
        signed = scene.signed(site, digest=digest)
        scene.vote(site, digests={site: digest}, statement=signed)
    step = scene.course().steps[KEY.text]
    assert (step.set, step.said["verdicts"]["b"]["code"]) == (("a", "c"), "uncommitted")
