"""Life of a run on the coordinator without its network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import replies as views
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.service import Coordinator
from dilocox.coordinator.server.startup import RunStart
from dilocox.errors import TrainingError
from tests.support.coordinator_driver import VERSIONS, Driver, numbers, replayed, run_config

pytestmark = pytest.mark.waits

OUTER = m.ExchangeKey.outer


def test_start_waits_for_all_sites_and_their_ranks(driver: Driver) -> None:
    driver.enrol("c")
    driver.enrol("a")
    assert driver.core.state.phase == "enrolling"
    assert driver.core.state.epoch == 0
    driver.enrol("b")
    state = driver.core.state
    assert (state.phase, state.founder, state.epoch) == ("starting", "a", 1)
    assert [state.sites[name].donor for name in "abc"] == [None, "a", "a"]
    for site in "ab":
        driver.ready(site)
    assert driver.plan(0, "a") is None
    driver.ready("c")
    plan = driver.plan(0, "a")
    assert plan is not None
    assert list(plan.members) == ["a", "b", "c"]
    assert sorted(numbers(plan)) == list(range(3 * 4 * 4))


def test_a_site_that_loads_a_large_model_is_alive_and_not_there(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(), wait_for=2)
    limit = driver.core.timeouts.first_beat
    for name in "ab":
        driver.enrol(name)
    building = {"building": True}

    def pass_time(*sites: str) -> None:
        # In steps: a coordinator that was asleep takes nobody for dead.
        for _ in range(int(limit)):
            driver.clock.time += 1.0
            for name in sites:
                driver.beat(name, **building)
            driver.core.expire()

    for _ in range(3):
        pass_time("a", "b")
    assert driver.core.state.with_role("gone") == []
    for name in "ab":
        driver.ready(name)
        driver.beat(name)
    driver.enrol("c")
    reply = driver.beat("c", **building)
    # It enters, and others count on it, once all its ranks are there.
    assert (reply.role, driver.core.state.sites["c"].role) == ("enrolled", "enrolled")
    assert driver.beat("c").role == "entering"
    driver.core.close()


def test_wait_for_fewer_sites(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(), wait_for=2)
    driver.enrol("c")
    driver.enrol("b")
    assert driver.core.state.founder == "b"
    with pytest.raises(TrainingError, match="wait_for 9"):
        Coordinator(run_config(), tmp_path / "other", RunStart(wait_for=9))
    driver.core.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token": "dilocox1-" + "0" * 64 + "-" + "0" * 32}, "token: not a token of this run"),
        ({"run_digest": "1" * 64}, "run file differs"),
        ({"run_digest": "1" * 64, "code_digest": "2" * 64}, "SHA-256 22222.*this run has none"),
        ({"stages": 2}, "2 stages x 1 shards, but this run has 1 x 1"),
        ({"versions": VERSIONS.model_copy(update={"torch": "2.12.0"})}, "torch 2.12.0, but"),
        ({"versions": VERSIONS.model_copy(update={"dilocox": "9"})}, "dilocox 9, but"),
        ({"versions": VERSIONS.model_copy(update={"python": "3.11.9"})}, "python 3.11.9, but"),
        ({"versions": VERSIONS.model_copy(update={"defaults": "12ab"})}, "defaults 12ab, but"),
        ({"data_digest": "2" * 64}, "token files differ"),
        ({"site": "x"}, "not in the run file; use one of: a, b, c"),
        ({"site": "a"}, "taken, it is enrolled already"),
        ({"csr": "hello"}, "signing request is not a valid"),
    ],
)
def test_enrolment_refusals(driver: Driver, changes: dict[str, Any], text: str) -> None:
    driver.enrol("a", data_digest="0" * 64)
    with pytest.raises(Refused, match=text) as refused:
        driver.enrol(**{"site": "b", **changes})
    assert refused.value.kind == ("taken" if "taken" in text else "join")
    assert "\n" not in str(refused.value)
    assert driver.core.state.live == ["a"]


def test_a_site_with_other_functions_is_told_so(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("ab", run={"code": "3" * 64}), wait_for=1)
    for code, text in (
        (None, "has no functions of the user's own, and this run trains with those of SHA-256 333"),
        ("2" * 64, "have SHA-256 222222222222…, and this run has SHA-256 333333333333…; copy the"),
        ("3" * 64, "its run file differs"),
    ):
        with pytest.raises(Refused, match=text):
            driver.enrol("a", run_digest="1" * 64, code_digest=code)
    driver.enrol("a", code_digest="3" * 64)
    driver.core.close()


def test_nobody_enters_a_synchronous_run_late(tmp_path: Path) -> None:
    config = run_config("ab", outer={"method": "allreduce", "rounds": 4})
    driver = Driver(tmp_path, config, wait_for=1)
    driver.enrol("a")
    with pytest.raises(Refused, match="allreduce a site cannot enter after the start"):
        driver.enrol("b")
    late = Driver(tmp_path / "other", run_config("ab", outer={"rounds": 4}), wait_for=1)
    late.enrol("a")
    assert late.enrol("b").incarnation == 1


def test_enrolment_that_is_the_same_for_all_purposes(driver: Driver) -> None:
    first = driver.enrol("a")
    again = driver.enrol("a", csr=driver_csr(driver, "a"))
    assert again == first
    other = VERSIONS.model_copy(update={"torch": "2.13.0+cu130", "python": "3.12.9"})
    assert driver.enrol("b", versions=other).incarnation == 1


def driver_csr(driver: Driver, site: str) -> str:
    """The signing request that `site` used first (the first of all has no added newline)."""
    from tests.support.coordinator_driver import CSR

    assert driver.incarnations == {site: 1}
    return CSR


def test_gather_commits_what_all_hold_once_all_have_voted(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(shards=2))
    driver.start()
    driver.plan(0, "a")
    key = OUTER(0, 0, 1)
    assert [item.site for item in driver.begin(key, "b").members] == ["a", "b", "c"]
    everyone, replies = list("cab"), []
    for site in "abc":
        for shard in (0, 1):
            held = ["b", "a"] if (site, shard) in (("a", 1), ("b", 1)) else everyone
            says = (site, shard) != ("b", 0)
            replies.append(driver.vote(key, site, shard=shard, held=held, contributes=says))
    assert [reply.decision for reply in replies] == ["wait"] * 5 + ["commit"]
    # c is not whole at most of shard 1, b does not contribute with all its shards.
    assert replies[-1].set == ["a"]
    assert replies[0].waiting_for[0] == "a stage 0 shard 1"
    late = driver.vote(key, "a", held=everyone)
    assert (late.decision, late.set) == ("commit", ["a"])
    assert replayed(driver) == driver.core.state
    driver.core.close()


def test_reduce_fixes_the_set_then_waits_for_the_average(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(outer={"exchange": "reduce"}))
    driver.start()
    driver.plan(0, "a")
    key = m.ExchangeKey.outer(0, 0, 1)
    driver.begin(key, "a")
    for site in "ab":
        assert driver.vote(key, site, held=list("abc")).decision == "wait"
    with pytest.raises(Refused, match="before its set was fixed"):
        driver.vote(key, "a", phase="done")
    last = driver.vote(key, "c", held=list("abc"), contributes=False)
    assert (last.decision, last.set) == ("average", ["a", "b"])
    assert driver.vote(key, "a", held=list("abc")).decision == "average"
    assert driver.vote(key, "a", phase="done").decision == "wait"
    driver.leave("c")
    assert driver.vote(key, "a", phase="done").decision == "repeat"
    for site, decision in (("a", "wait"), ("b", "average")):
        assert driver.vote(key, site, 2, held=["a", "b"]).decision == decision
    driver.vote(key, "a", 2, phase="done")
    final = driver.vote(key, "b", 2, phase="done")
    assert (final.decision, final.set) == ("commit", ["a", "b"])
    driver.core.close()


def test_a_site_that_dies_midway_is_left_out_and_its_ranges_return(driver: Driver) -> None:
    driver.start()
    plan = driver.plan(0, "a")
    assert plan is not None
    key = OUTER(0, 0, 0)
    driver.begin(key, "a")
    for site in "ac":
        driver.vote(key, site, held=list("abc"))
    for site in "abc":
        driver.beat(site)
    driver.clock.time += 4
    for site in "ac":
        driver.beat(site)
    driver.core.expire()
    assert driver.core.state.live == ["a", "b", "c"]
    driver.clock.time += 1
    driver.core.expire()
    assert driver.core.state.sites["b"].reason == "no beat from stage 0 shard 0 for 4.5 s"
    assert driver.begin(key, "a").attempt == 2
    assert [item.site for item in driver.begin(key, "c").members] == ["a", "c"]
    assert driver.vote(key, "a", 1, held=list("abc")).decision == "repeat"
    # c still holds what b sent, but b cannot be counted any more.
    driver.vote(key, "a", 2, held=list("abc"))
    assert driver.vote(key, "c", 2, held=list("abc")).set == ["a", "c"]
    with pytest.raises(Refused, match="gone"):
        driver.beat("b")
    # Its numbers come first in the next plan.
    next_plan = driver.plan(1, "c")
    assert next_plan is not None
    lost = plan.members["b"].ranges
    assert next_plan.members["a"].ranges == lost
    assert next_plan.members["c"].ranges == [(48, 16)]


def test_rejoin_has_a_new_incarnation_and_contributes_from_the_next_plan(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    driver.plan(1, "a")
    driver.leave("b", "broken", failed=True)
    before = driver.core.state.epoch
    assert driver.enrol("b").incarnation == 2
    assert driver.core.state.epoch == before
    with pytest.raises(Refused, match="replaced by a newer one"):
        driver.core.check(Caller("b", 1), m.RankId(site="b", stage=0, shard=0))
    reply = driver.beat("b")
    assert (reply.role, reply.donor, reply.epoch.id) == ("entering", "a", before + 1)
    key = OUTER(0, 0, 0)
    roles = {item.site: item.role for item in driver.begin(key, "a").members}
    assert roles == {"a": "member", "b": "entering", "c": "member"}
    with pytest.raises(Refused, match="does not vote"):
        driver.vote(key, "b", held=["a"])
    assert driver.vote(key, "b", observer=True).decision == "wait"
    driver.ready("b")
    # Plans 0 and 1 name the incarnation that is gone: the new one has no vote there.
    assert driver.core.state.sites["b"].active_from == 2
    driver.vote(key, "a", held=["a", "c"])
    assert driver.vote(key, "c", held=["a", "b", "c"]).set == ["a", "c"]
    assert driver.vote(key, "b", observer=True).set == ["a", "c"]
    plan = driver.plan(2, "a")
    assert plan is not None
    assert list(plan.members) == ["a", "b", "c"]


def test_donor_and_founder_are_replaced(driver: Driver) -> None:
    for site in "abc":
        driver.enrol(site)
    driver.ready("c")
    driver.leave("a")
    # c has all of theta_0, so it is the founder now.
    assert driver.core.state.founder == "c"
    assert driver.beat("b").donor == "c"
    driver.ready("b")
    driver.enrol("a")
    assert driver.beat("a").donor == "b"
    driver.leave("b")
    assert driver.beat("a").donor == "c"
    driver.leave("c")
    assert driver.core.state.phase == "failed"
    assert "no active site is left" in driver.core.state.reason


def test_plans_run_at_most_two_rounds_ahead(driver: Driver) -> None:
    driver.start()
    seen = [driver.plan(round_, "a") is not None for round_ in (0, 1, 2, 3)]
    assert seen == [True, True, True, False]
    driver.round_done("a", 0)
    driver.round_done("b", 0)
    waiting = driver.core.plan(3, Caller("a", 1)).waiting_for
    assert waiting == "the end of round 0 at c"
    driver.round_done("c", 0)
    plan = driver.plan(3, "a")
    assert plan is not None
    assert (plan.last, plan.checkpoint, plan.first_tick) == (True, False, 12)
    for site in "abc":
        driver.round_done(site, 1)
    flush = driver.plan(4, "b")
    assert flush is not None
    assert (flush.kind, flush.slots, flush.codec, flush.first_tick) == ("flush", 0, "int8", 16)
    assert (flush.checkpoint, flush.evaluate, flush.last) == (True, True, True)
    assert numbers(flush) == []
    with pytest.raises(Refused, match="round 5"):
        driver.plan(5, "a")
    for site in "abc":
        driver.finish(site)
    assert driver.core.state.phase == "finished"
    states = {entry.state for entry in views.ledger(driver.core.state).entries}
    assert states == {"issued", "committed"}


def test_spaces_of_private_text_and_weights(tmp_path: Path) -> None:
    config = run_config("ab", checkpoint={"every_rounds": 2})
    raw = config.model_copy(
        update={
            "sites": {
                **config.sites,
                "b": config.sites["b"].model_copy(update={"data": "own", "batch_size": 12}),
            }
        }
    )
    driver = Driver(tmp_path, raw)
    driver.start()
    plan = driver.plan(0, "a")
    assert plan is not None
    assert plan.members["a"].ranges == [(0, 16)]
    assert (plan.members["b"].ranges, plan.members["b"].space) == ([(0, 48)], "site/b")
    assert [member.weight for member in plan.members.values()] == [0.5, 1.5]
    second = driver.plan(1, "a")
    assert second is not None
    assert (plan.checkpoint, second.checkpoint) == (False, True)
    # A private range waits for its own site.
    driver.leave("b")
    third = driver.plan(2, "a")
    assert third is not None
    assert third.members["a"].ranges == [(32, 16)]
    assert driver.core.state.ledger.pool == {"site/b": [(0, 96)]}
    driver.core.close()


def test_a_broken_attempt_is_repeated_in_a_new_epoch(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    first, second = OUTER(0, 0, 0), OUTER(0, 0, 1)
    for key in (first, second):
        driver.begin(key, "a")
    epoch = driver.core.state.epoch
    reply = driver.vote(first, "b", broken=True, failed=["c"])
    assert (reply.decision, reply.attempt, reply.epoch) == ("repeat", 2, epoch + 1)
    # The other exchange of the broken group follows into the same epoch.
    assert driver.vote(second, "b", broken=True, failed=["c"]).epoch == epoch + 1
    # Named again by all others, in two attempts: out.
    driver.vote(first, "a", broken=True, failed=["c"])
    assert driver.core.state.live == ["a", "b", "c"]
    driver.vote(first, "a", 2, broken=True, failed=["c"])
    driver.vote(first, "b", 2, broken=True, failed=["c"])
    assert driver.core.state.sites["c"].reason == "unreachable"
    attempt = driver.begin(first, "a").attempt
    driver.vote(first, "a", attempt, held=["a", "b"])
    assert driver.vote(first, "b", attempt, held=["a", "b"]).set == ["a", "b"]
    assert replayed(driver) == driver.core.state


def test_one_that_enters_and_cannot_be_reached_goes_before_any_other(tmp_path: Path) -> None:
    """It is missed by nobody, whoever else is named, and however its own reports sound."""
    driver = Driver(tmp_path, run_config(), wait_for=2)
    for site in "bc":
        driver.enrol(site)
    for site in "bc":
        driver.ready(site)
    driver.enrol("a")
    assert driver.beat("a").role == "entering"
    driver.plan(0, "b")
    key = OUTER(0, 0, 0)
    assert driver.begin(key, "b").members[0].role == "entering"
    driver.vote(key, "c", 1, broken=True, failed=["a", "b"])
    driver.vote(key, "b", 2, broken=True, failed=["c"])
    assert driver.core.state.live == ["a", "b", "c"]
    # It says itself that it gets nothing: heard, and to be repeated.
    reply = driver.vote(key, "a", 3, broken=True, failed=["b"])
    assert reply.decision == "repeat"
    assert driver.core.state.sites["a"].reason == "unreachable"
    assert driver.core.state.live == ["b", "c"]
    attempt = driver.begin(key, "b").attempt
    driver.vote(key, "c", attempt, held=["b", "c"])
    assert driver.vote(key, "b", attempt, held=["b", "c"]).set == ["b", "c"]
    assert replayed(driver) == driver.core.state
    driver.core.close()


def test_who_only_receives_does_not_vote(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("ab"), wait_for=1)
    driver.enrol("a")
    driver.ready("a")
    driver.enrol("b")
    driver.beat("b")
    driver.plan(0, "a")
    driver.begin(OUTER(0, 0, 0), "a")
    with pytest.raises(Refused, match="does not vote"):
        driver.vote(OUTER(0, 0, 0), "b", held=["a"])
    driver.core.close()


def test_two_sites_without_a_link_do_not_drop_each_other_both(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("ab"))
    driver.start()
    driver.plan(0, "a")
    key = OUTER(0, 0, 0)
    driver.begin(key, "a")
    for attempt in (1, 2, 3, 4):
        assert driver.core.state.live == ["a", "b"]
        driver.vote(key, "b", attempt, broken=True, failed=["a"])
        if attempt < 4:
            driver.vote(key, "a", attempt, broken=True, failed=["b"])
    assert driver.core.state.live == ["a"]
    driver.core.close()


def test_an_entering_rank_may_begin_first_and_late_blame_is_no_news(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    driver.leave("c")
    driver.enrol("c")
    key = OUTER(0, 0, 0)
    with pytest.raises(Refused, match="has not entered yet"):
        driver.begin(key, "c")
    driver.beat("c")
    assert [item.role for item in driver.begin(key, "c").members] == ["member"] * 2 + ["entering"]
    driver.leave("c")
    reply = driver.vote(key, "a", 1, broken=True, failed=["c"])
    assert (reply.decision, reply.attempt) == ("repeat", 2)
    assert driver.core.state.exchanges[key.text].broken == {}


def test_broken_for_no_reason_ends_the_run(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    key = OUTER(0, 0, 0)
    driver.begin(key, "a")
    for attempt in (1, 2, 3):
        driver.vote(key, "a", attempt, broken=True)
    with pytest.raises(Refused, match="run failed: exchange outer/0/0/0: broken 4 times"):
        driver.vote(key, "a", 4, broken=True)


def test_lease_and_stop(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(outer={"inner_steps": 200}))
    driver.start()
    assert driver.beat("a").lease == 2
    assert driver.beat("a", 2, slot_seconds=0.01).lease == 202
    assert driver.beat("b", 50, slot_seconds=0.01).lease == 202
    assert driver.beat("a", 150, slot_seconds=0.01).lease == 350
    with pytest.raises(Refused, match="beyond its lease"):
        driver.beat("c", 351)
    assert driver.core.departures.stop(m.StopRequest(reason="SIGINT")).stop_tick == 350
    assert driver.core.departures.stop(m.StopRequest(reason="again")).stop_tick == 350
    reply = driver.beat("c", 20)
    assert (reply.phase, reply.stop_tick, reply.lease) == ("stopping", 350, 350)
    driver.reopen()
    assert driver.core.state.stop_tick == 350
    plans = [driver.plan(round_, "a") for round_ in (0, 1)]
    assert plans[1] is not None
    for site in "abc":
        driver.write_checkpoint(site, 350, 1, 350 - plans[1].first_tick)
        driver.finish(site, complete=False)
    assert driver.core.state.phase == "stopped"
    assert views.checkpoints(driver.core.state).checkpoints[0].complete
    driver.core.close()


def test_a_lease_is_no_longer_for_beats_that_come_close_together(tmp_path: Path) -> None:
    """Slots of 1 s, beats each 1 s: until the first round is timed, the lease is some 4 slots long,
    though a rank that waits for it beats as fast as it can."""
    driver = Driver(tmp_path, run_config(outer={"inner_steps": 200}))
    driver.start()
    driver.beat("a")
    lease = 2
    finished = 0
    begin = driver.clock.time
    while finished < 20:
        driver.clock.time = begin + finished + 0.999
        assert driver.beat("a", finished).lease - finished <= 4
        driver.clock.time = begin + finished + 1.0
        finished += 1
        lease = driver.beat("a", finished).lease
        assert lease - finished <= 4
    assert lease - finished >= 2
    driver.core.close()


def test_coordinator_that_was_asleep_does_not_take_all_for_dead(driver: Driver) -> None:
    driver.start()
    for site in "abc":
        driver.beat(site)
    driver.core.expire()
    driver.clock.time += 1000
    driver.core.expire()
    assert driver.core.state.live == ["a", "b", "c"]
    for _ in range(4):
        driver.clock.time += 2
        driver.beat("a")
        driver.core.expire()
    assert driver.core.state.live == ["a"]


@pytest.mark.parametrize("phase", ["before", "running"])
def test_a_site_that_asks_for_the_end_is_named(tmp_path: Path, phase: str) -> None:
    driver = Driver(tmp_path, run_config())
    if phase == "running":
        driver.start()
    else:
        driver.enrol("a")
    driver.core.departures.stop(m.StopRequest(reason="enough"), Caller("b", 1))
    text = driver.core.state.feed[-1][-1]
    assert text.endswith("enough (as b asks)")
    assert driver.core.state.reason == "enough"
    assert replayed(driver) == driver.core.state
    driver.core.close()
