"""Snapshots of a run's state: a restart from one gives what all events add up to, whatever was
killed, damaged or made by other code."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.coordinator.server import snapshots
from dilocox.coordinator.server.event_log import NAME, EventLog
from dilocox.coordinator.server.events import Resumed
from dilocox.coordinator.server.restore import restored, start_of
from dilocox.coordinator.server.resume import resume_point
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.errors import CheckpointError
from tests.coordinator.server.test_core_log import run_two_rounds
from tests.coordinator.server.test_properties import Watched, steps
from tests.support.coordinator_driver import Driver, open_coordinator, replayed, run_config

pytestmark = pytest.mark.waits


@pytest.fixture(autouse=True, scope="module")
def often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(snapshots, "EVENTS", 3)
        yield


class Bare(EventLog):
    """A log without snapshots."""

    def snapshots(self, code: str, until: int | None = None) -> Iterator[tuple[int, bytes]]:
        return iter(())


def resumed(driver: Driver, tick: int | None = None) -> Resumed | str:
    core = driver.core
    try:
        return resume_point(core.config, core.log, core.state, 0.0, tick)
    except CheckpointError as error:
        return str(error)


def check_as_without(driver: Driver) -> None:
    """All that is made from the log is the same with and without snapshots."""
    core = driver.core
    log = core.log
    plain = replayed(driver)
    assert restored(core.config, log) == plain == core.state
    ticks = [None, *(t for t, item in plain.checkpoints.items() if item.sites is not None)]
    with_snapshots = [resumed(driver, tick) for tick in ticks]
    log.__class__ = Bare
    without = [resumed(driver, tick) for tick in ticks]
    log.__class__ = EventLog
    assert with_snapshots == without
    assert list(map(str, with_snapshots)) == list(map(str, without)), "in the same order"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["gather", "reduce"]), steps)
def test_a_restart_gives_the_same_state_whatever_happened(
    exchange: str, taken: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        driver = Watched(Path(folder), exchange)
        try:
            for step in taken:
                driver.step(*step)
            check_as_without(driver)
            state = driver.core.state
            again = snapshots.unpacked(driver.config, snapshots.packed(state))
            assert again == state
            # A dict's order counts where sites and open exchanges are gone through.
            assert str(again) == str(snapshots.unpacked(driver.config, snapshots.packed(again)))
            assert list(again.sites) == list(state.sites)
            assert list(again.undecided) == list(state.undecided)
        finally:
            driver.core.close()


def test_a_run_goes_on_from_a_snapshot(driver: Driver) -> None:
    driver.start()
    run_two_rounds(driver)
    log = driver.core.log
    number, state = start_of(driver.config, log, log.last, lambda state: True)
    assert log.last - number <= 8
    assert state.next_round >= 1
    check_as_without(driver)
    driver.reopen()
    driver.core.resume()
    check_as_without(driver)
    driver.start()
    assert driver.plan(1, "b") is not None
    check_as_without(driver)


def test_only_the_newest_stay(driver: Driver) -> None:
    driver.start()
    run_two_rounds(driver)
    numbers = [number for number, _ in driver.core.log.snapshots(snapshots.code())]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) <= snapshots.KEPT


class Copied:
    """A database that is copied, with its journal, before every statement and at the end."""

    def __init__(self, folder: Path, database: sqlite3.Connection, copies: Path) -> None:
        self._folder, self._database, self._copies, self.count = folder, database, copies, 0

    def execute(self, *given: Any) -> Any:
        self.copy()
        return self._database.execute(*given)

    def copy(self) -> None:
        target = self._copies / str(self.count)
        target.mkdir(parents=True)
        for path in self._folder.glob(f"{NAME}*"):
            shutil.copy(path, target)
        self.count += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


def test_a_kill_between_any_two_writes(driver: Driver, tmp_path: Path) -> None:
    """As a kill leaves the files: all that was written, nothing that was not."""
    driver.start()
    database = driver.core.log._database
    copies = Copied(driver.folder, database, tmp_path / "copies")
    driver.core.log._database = copies  # type: ignore[assignment]
    run_two_rounds(driver)
    copies.copy()
    driver.core.log._database = database
    lasts, from_snapshots = [], 0
    for number in range(copies.count):
        log = EventLog(tmp_path / "copies" / str(number))
        state = restored(driver.config, log)
        plain = CoordinatorState(driver.config)
        for event in log.events():
            plain.apply(event)
        assert state == plain
        from_snapshots += any(True for _ in log.snapshots(snapshots.code()))
        lasts.append(log.last)
        log.close()
    assert lasts == sorted(lasts)
    assert lasts[-1] == driver.core.log.last
    assert from_snapshots > copies.count // 2


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE snapshots SET data = zeroblob(40)",
        "UPDATE snapshots SET digest = 'another'",
        "UPDATE snapshots SET data = x'00', "
        "digest = '6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d'",
        "UPDATE snapshots SET code = 'another version'",
        "DROP TABLE snapshots",
    ],
)
def test_what_is_no_snapshot_is_passed_over(
    driver: Driver, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole log is there, and read. A log of an earlier version has none."""
    driver.start()
    run_two_rounds(driver)
    before = driver.core.state
    driver.core.close()
    with sqlite3.connect(driver.folder / NAME) as database:
        database.execute(damage)
    database.close()
    driver.core = open_coordinator(driver.config, driver.folder, **driver.options)
    assert driver.core.state == before


def test_a_full_disk_leaves_a_snapshot_out(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.start()
    core = driver.core

    class Full:
        """Its disk is full for snapshots."""

        def execute(self, text: str, *given: Any) -> Any:
            if "snapshots" in text:
                raise sqlite3.OperationalError("database or disk is full")
            return database.execute(text, *given)

        def __getattr__(self, name: str) -> Any:
            return getattr(database, name)

    database = core.log._database
    core.log._database = Full()  # type: ignore[assignment]
    run_two_rounds(driver)
    core.log._database = database
    assert "no snapshot was written (database or disk is full)" in caplog.text
    assert core.log.path.exists()
    check_as_without(driver)


def test_old_rounds_and_checkpoints_are_not_kept(tmp_path: Path) -> None:
    """What the state holds does not grow with the rounds, but for the ledger."""
    driver = Driver(tmp_path, run_config("ab", outer={"rounds": 80}))
    driver.start()
    for round_ in range(60):
        assert driver.plan(round_, "a") is not None
        for site in "ab":
            driver.round_done(site, round_)
            driver.write_checkpoint(site, 4 * round_ + 2, round_, 2)
    state = driver.core.state
    assert len(state.plans) <= 50
    assert len(state.checkpoints) == 32
    assert max(state.checkpoints) == 4 * 59 + 2
    check_as_without(driver)
    driver.core.resume(min(state.checkpoints))
    driver.start()
    assert driver.plan(state.first_round, "a") is not None
    driver.core.close()
