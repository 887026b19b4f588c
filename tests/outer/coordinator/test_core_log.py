"""The coordinator's log: restart, reports, resume, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.errors import CheckpointError, TrainingError
from dilocox.outer.coordinator import messages as m
from dilocox.outer.coordinator import views
from dilocox.outer.coordinator.core import Coordinator
from dilocox.outer.coordinator.refusals import Refused
from tests.outer.coordinator.helpers import Driver, numbers, replayed, run_config

OUTER = m.ExchangeKey.outer


def test_restart_replays_and_gives_time_to_come_back(driver: Driver) -> None:
    driver.start()
    driver.plan(0, "a")
    key = OUTER(0, 0, 0)
    driver.begin(key, "a")
    driver.vote(key, "a", held=list("abc"))
    before, token = driver.core.state, str(driver.core.authority.token)
    with pytest.raises(TrainingError, match="another coordinator is running"):
        Coordinator(driver.config, driver.folder)
    driver.reopen()
    assert driver.core.state == before
    assert str(driver.core.authority.token) == token
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
    for name in ("secret", "authority.pem", "server.pem", "operator.json", "coordinator.sqlite"):
        assert (driver.folder / name).stat().st_mode & 0o077 == 0, name


def test_damaged_log_is_recognised(tmp_path: Path) -> None:
    Coordinator(run_config(), tmp_path).close()
    (tmp_path / "coordinator.sqlite").write_bytes(b"not a database at all" * 100)
    (tmp_path / "coordinator.sqlite-wal").unlink(missing_ok=True)
    with pytest.raises(TrainingError, match="not a readable event log"):
        Coordinator(run_config(), tmp_path)


def test_reports_count_once_and_a_broken_writer_does_not_stop_the_run(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def writer(site: str, round_: int, kind: str, metrics: dict[str, Any]) -> None:
        seen.append((site, round_))
        raise OSError("disk full")

    driver = Driver(tmp_path, run_config(), on_report=writer)
    driver.start()
    rank = driver.ranks("a")[0]
    for loss in (1.0, 2.0):
        driver.core.report(m.ReportRequest(rank=rank, round=0, metrics={"loss": loss}))
    assert seen == [("a", 0)]
    assert views.status(driver.core.state, 0).sites[0].metrics["round"]["loss"] == 1.0
    driver.core.close()


def test_what_a_report_shows_to_be_wrong_ends_the_run(tmp_path: Path) -> None:
    """Sites that hold different anchors do not train one model: the recorder says so."""

    def recorder(site: str, round_: int, kind: str, metrics: dict[str, Any]) -> None:
        raise TrainingError("round 0: the sites hold different anchors")

    driver = Driver(tmp_path, run_config(), on_report=recorder)
    driver.start()
    rank = driver.ranks("a")[0]
    driver.core.report(m.ReportRequest(rank=rank, round=0, metrics={"loss": 1.0}))
    driver.core.report(m.ReportRequest(rank=rank, round=1, metrics={"loss": 1.0}))
    status = views.status(driver.core.state, 0)
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

    def __init__(self, time: float) -> None:
        self.time = time

    def to_json(self) -> dict[str, Any]:
        return {}
