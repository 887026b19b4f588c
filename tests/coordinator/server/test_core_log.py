"""The coordinator's log: restart, reports, resume, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import replies
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.service import Coordinator
from dilocox.errors import CheckpointError, TrainingError
from tests.support.coordinator_driver import Driver, numbers, replayed, run_config

pytestmark = pytest.mark.waits

OUTER = m.ExchangeKey.outer


def test_restart_replays_and_gives_time_to_come_back(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    key = OUTER(0, 0, 0)
    driver.begin(key, "a")
    driver.vote(key, "a", held=list("abc"))
    before, token = driver.core.state, str(driver.core.tokens.of("a"))
    with pytest.raises(TrainingError, match="another coordinator is running"):
        Coordinator(driver.config, driver.folder)
    driver.reopen()
    assert driver.core.state == before
    assert str(driver.core.tokens.of("a")) == token
    driver.clock.time += 9
    driver.core.expire()
    assert driver.core.state.live == ["a", "b", "c"]
    driver.vote(key, "b", held=list("abc"))
    assert driver.vote(key, "c", held=list("abc")).set == ["a", "b", "c"]
    driver.core.close()
    other = run_config(run={"seed": 7})
    with pytest.raises(TrainingError, match="another run file"):
        Coordinator(other, driver.folder)
    driver.core = Coordinator(driver.config, driver.folder)


def test_private_files_are_private(driver: Driver) -> None:
    for name in (
        "token-secret",
        "authority.pem",
        "server.pem",
        "operator.json",
        "coordinator.sqlite",
    ):
        assert (driver.folder / name).stat().st_mode & 0o077 == 0, name


def test_damaged_log_is_recognised(tmp_path: Path) -> None:
    Coordinator(run_config(), tmp_path).close()
    (tmp_path / "coordinator.sqlite").write_bytes(b"not a database at all" * 100)
    (tmp_path / "coordinator.sqlite-wal").unlink(missing_ok=True)
    with pytest.raises(TrainingError, match="not a readable event log"):
        Coordinator(run_config(), tmp_path)


def test_reports_count_once_and_a_broken_writer_does_not_stop_the_run(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def writer(site: str, round_: int, kind: str, metrics: dict[str, Any]) -> bool:
        seen.append((site, round_))
        raise OSError("disk full")

    driver = Driver(tmp_path, run_config(), on_report=writer)
    driver.start()
    rank = driver.ranks("a")[0]
    for loss in (1.0, 2.0):
        said = m.ReportRequest(rank=rank, round=0, metrics={"loss": loss})
        assert not driver.core.report(said).kept
    assert seen == [("a", 0)]
    assert replies.status(driver.core.state, 0).sites[0].metrics["round"]["loss"] == 1.0
    driver.core.close()


def test_warnings_of_one_round_are_about_several_things(tmp_path: Path) -> None:
    """Each is told once: that nothing can be kept, and that a GPU lacks a kernel."""
    seen: list[str] = []

    def writer(site: str, round_: int, kind: str, metrics: dict[str, Any]) -> bool:
        seen.append(metrics["text"])
        return True

    driver = Driver(tmp_path, run_config(), on_report=writer)
    driver.start()
    rank = driver.ranks("a")[0]
    for text in ("no kernel", "no kernel", "no store"):
        said = m.ReportRequest(rank=rank, round=0, kind="warning", metrics={"text": text})
        driver.core.report(said)
    assert seen == ["no kernel", "no store"]
    driver.core.close()


def test_what_a_report_shows_to_be_wrong_ends_the_run(tmp_path: Path) -> None:
    """Sites that hold different anchors do not train one model: the recorder says so."""

    def recorder(site: str, round_: int, kind: str, metrics: dict[str, Any]) -> bool:
        raise TrainingError("round 0: the sites hold different anchors")

    driver = Driver(tmp_path, run_config(), on_report=recorder)
    driver.start()
    rank = driver.ranks("a")[0]
    driver.core.report(m.ReportRequest(rank=rank, round=0, metrics={"loss": 1.0}))
    driver.core.report(m.ReportRequest(rank=rank, round=1, metrics={"loss": 1.0}))
    status = replies.status(driver.core.state, 0)
    assert (status.phase, status.reason) == ("failed", "round 0: the sites hold different anchors")
    driver.core.close()


def run_two_rounds(driver: Driver) -> list[m.RoundPlan]:
    """Rounds 0 and 1 of all sites; a checkpoint within round 1; then plan 2."""
    plans = run_two_rounds_of(driver, ["a", "b", "c"])
    third = driver.plan(2, "a")
    assert third is not None
    return [*plans, third]


def test_resume_twice_keeps_the_recorded_plan_and_the_ranges(driver: Driver) -> None:
    driver.start()
    plans = run_two_rounds(driver)
    epochs = [driver.core.state.epoch]
    for _ in range(2):
        driver.reopen()
        event = driver.core.resume()
        assert (event.tick, event.round, event.slot) == (6, 1, 2)
        assert driver.core.state.phase == "enrolling"
        driver.start()
        assert driver.core.state.lease == 6
        assert driver.plan(1, "b") == plans[1]
        # Exchanges of round 0 that were in flight are voted on again.
        key = OUTER(0, 0, 1)
        driver.begin(key, "a")
        for site in "abc":
            reply = driver.vote(key, site, held=list("abc"))
        assert reply.set == ["a", "b", "c"]
        assert driver.plan(2, "c") == plans[2]
        epochs.append(driver.core.state.epoch)
        for site in "abc":
            driver.round_done(site, 1)
        assert replayed(driver) == driver.core.state
    assert epochs == sorted(set(epochs))
    entries = driver.core.state.ledger.entries
    assert {entry.state for entry in entries if entry.round < 2} == {"committed"}


def test_resume_without_a_site_gives_its_ranges_to_the_others(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config(outer={"min_sites": 1}), wait_for=2)
    for site in "ab":
        driver.enrol(site)
    for site in "ab":
        driver.ready(site)
    plans = run_two_rounds_of(driver, ["a", "b"])
    driver.core.resume()
    driver.enrol("a")
    driver.enrol("c")
    driver.ready("a")
    driver.beat("c")
    driver.ready("c")
    assert driver.plan(1, "a") == plans[1]
    assert driver.core.state.sites["c"].active_from == 2
    plan = driver.plan(2, "a")
    assert plan is not None
    assert plan.members["a"].ranges == plans[1].members["b"].ranges
    taken = [*numbers(plan), *(n for n in numbers(plans[1]))]
    owned = [
        number
        for entry in driver.core.state.ledger.entries
        if entry.state != "returned"
        for number in range(entry.start, entry.start + entry.count)
    ]
    assert len(owned) == len(set(owned))
    assert set(taken) <= set(owned)
    driver.core.close()


def run_two_rounds_of(driver: Driver, sites: list[str]) -> list[m.RoundPlan]:
    plans = [driver.plan(0, sites[0]), driver.plan(1, sites[0])]
    for site in sites:
        driver.round_done(site, 0)
    for site in sites:
        driver.write_checkpoint(site, 6, 1, 2)
    assert all(plan is not None for plan in plans)
    return [plan for plan in plans if plan is not None]


def test_resume_needs_a_complete_checkpoint(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    driver.write_checkpoint("a", 3, 0, 3)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        driver.core.resume()
    for site in "bc":
        driver.write_checkpoint(site, 3, 0, 3)
    with pytest.raises(CheckpointError, match=r"at slot 4 .there are: 3"):
        driver.core.resume(4)
    assert driver.core.resume(3).slot == 3
    with pytest.raises(Refused, match="gone"):
        driver.beat("a")


def test_unknown_event_in_the_log_is_refused(driver: Driver) -> None:
    driver.core.log.append(Strange(0.0))  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"not a readable event log .event 2: KeyError"):
        list(driver.core.log.events())


class Strange:
    """An event of some other program."""

    stored_as = "Strange"

    def __init__(self, time: float) -> None:
        self.time = time

    def to_json(self) -> dict[str, Any]:
        return {}


def test_a_spoiled_checkpoint_sends_the_run_back_to_the_one_before(tmp_path: Path) -> None:
    resumed: list[int] = []
    driver = Driver(
        tmp_path, run_config("ab"), on_resumed=lambda event: resumed.append(event.round)
    )
    driver.start()
    ticks = []
    for round_ in range(2):
        plan = driver.plan(round_, "a")
        assert plan is not None
        ticks.append(plan.first_tick + plan.slots)
        for site in "ab":
            driver.round_done(site, round_)
        for site in "ab":
            driver.write_checkpoint(site, ticks[-1], round_ + 1, 0)
    rank = driver.ranks("a")[0]
    request = m.SpoiledRequest(rank=rank, tick=ticks[1], reason="x.distcp: changed")
    with pytest.raises(Refused, match="no site resumes from slot"):
        driver.core.saves.spoiled(request)  # while it is running nobody has looked at it
    driver.core.resume()
    assert resumed == [2]
    for site in "ab":
        driver.enrol(site)
    driver.core.saves.spoiled(request)
    assert resumed == [2, 1]
    assert (driver.core.state.phase, driver.core.state.first_tick) == ("enrolling", ticks[0])
    assert [c.tick for c in replies.checkpoints(driver.core.state).checkpoints] == [ticks[0]]
    # All sites have to come again; a restart of the coordinator knows it, too.
    with pytest.raises(Refused, match="join the run again"):
        driver.beat("b")
    assert replayed(driver) == driver.core.state
    for site in "ab":
        driver.enrol(site)
    driver.core.saves.spoiled(request.model_copy(update={"tick": ticks[0]}))
    assert driver.core.state.phase == "failed"
    assert "no complete checkpoint" in driver.core.state.reason
    driver.core.close()


def test_one_site_does_not_send_the_run_back_again_and_again(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abc"))
    driver.start()
    ticks = []
    for round_ in range(3):
        plan = driver.plan(round_, "a")
        assert plan is not None
        ticks.append(plan.first_tick + plan.slots)
        for site in "abc":
            driver.round_done(site, round_)
        for site in "abc":
            driver.write_checkpoint(site, ticks[-1], round_ + 1, 0)
    driver.core.resume()
    driver.enrol_all()

    def spoiled(site: str, tick: int) -> None:
        rank = driver.check(driver.ranks(site)[0])
        driver.core.saves.spoiled(m.SpoiledRequest(rank=rank, tick=tick, reason="changed"))

    with pytest.raises(Refused, match="fetch the state from a"):
        spoiled("b", ticks[2])
    spoiled("a", ticks[2])
    driver.enrol_all()
    spoiled("a", ticks[1])
    state = driver.core.state
    assert (state.phase, state.first_tick) == ("starting", ticks[1])
    assert (state.sites["a"].role, state.founder) == ("gone", "b")
    assert state.sites["a"].reason == (
        f"its part of the checkpoint at slot {ticks[1]} is damaged, too"
    )
    for site in "bc":
        driver.ready(site)
    assert (state.phase, state.with_role("active")) == ("running", ["b", "c"])
    driver.join("a")
    assert state.sites["a"].role == "active"
    assert not state.sites["a"].spoiled
    assert replayed(driver) == state
    driver.core.close()


def test_who_writes_no_checkpoint_is_named(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abm"))
    driver.start()
    for round_ in range(6):
        plan = driver.plan(round_, "a")
        assert plan is not None
        for site in "abm":
            driver.round_done(site, round_)
        for site in "ab" if round_ else "a":  # of the first one most have nothing
            driver.write_checkpoint(site, plan.first_tick + plan.slots, round_ + 1, 0)
        if plan.kind == "flush":
            break
    told = [text for *_, text in driver.core.state.feed if "has not written" in text]
    assert told[0] == (
        "checkpoint at slot 8: m has not written its part, and without it the run cannot go on "
        "from there"
    )
    assert len(told) == 2  # the first and the second time
    assert replayed(driver) == driver.core.state
    driver.leave("m")
    assert driver.core.state.checkpoints[8].sites == ["a", "b"]
    driver.core.close()


def test_a_site_that_leaves_is_planned_for_no_more_and_goes_when_done(tmp_path: Path) -> None:
    driver = Driver(tmp_path, run_config("abc", shards=2))
    driver.start()
    operator = Caller("operator", 0)
    assert driver.plan(0, "a") is not None
    stranger = Caller("b", driver.incarnations["b"])
    retire = m.RetireRequest(site="a", reason="maintenance")
    with pytest.raises(Refused, match="only itself or the operator"):
        driver.core.departures.retire(retire, stranger)
    with pytest.raises(Refused, match="not in the run file, which names: a, b, c"):
        driver.core.departures.retire(m.RetireRequest(site="x", reason="?"), operator)
    said = driver.core.departures.retire(retire, operator).text
    assert said == "site a leaves before round 1, after finishing all earlier rounds"
    assert driver.core.departures.retire(retire, operator).text == said, "again is the same"
    # It takes part in what was planned, and in nothing after that.
    key = OUTER(0, 0, 0)
    assert [x.site for x in driver.begin(key, "b").members] == ["a", "b", "c"]
    caller = Caller("a", driver.incarnations["a"])
    assert driver.core.plan(1, caller).leave
    plan = driver.plan(1, "b")
    assert plan is not None
    assert list(plan.members) == ["b", "c"]
    later = OUTER(1, 0, 0)
    assert [x.site for x in driver.begin(later, "b").members] == ["b", "c"]
    epoch = driver.core.state.epoch
    driver.reopen()
    ranks = driver.ranks("a")
    driver.core.departures.depart(m.DepartRequest(rank=ranks[0]))
    # The rank that has gone need not beat any more; the other one has to.
    assert driver.core.state.sites["a"].role == "active"
    driver.core.departures.depart(m.DepartRequest(rank=ranks[1]))
    site = driver.core.state.sites["a"]
    assert (site.role, site.reason) == ("gone", "asked to leave, and done")
    assert driver.core.state.epoch == epoch + 1
    assert driver.begin(later, "b").attempt == 1, "what is under way without it goes on"
    with pytest.raises(Refused, match=r"is not in the run now .it is gone"):
        driver.core.departures.retire(retire, operator)
    # At once, and back again; then the others, of whom the last takes the run along.
    driver.core.departures.retire(m.RetireRequest(site="b", reason="now", now=True), operator)
    assert driver.core.state.sites["b"].role == "gone"
    last = m.RetireRequest(site="c", reason="maintenance")
    assert "the run stops with a checkpoint" in driver.core.departures.retire(last, operator).text
    assert driver.core.state.phase == "stopping"
    assert replayed(driver) == driver.core.state
    driver.core.close()
