"""The run log that the coordinator's services share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.restore import restored
from dilocox.coordinator.server.run_log import RunLog
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.errors import TrainingError
from tests.support.coordinator_driver import Clock, run_config

pytestmark = pytest.mark.waits

CONFIG = run_config("a")
CREATED = e.Created(1.0, "d" * 64, "run")
ENROLLED = e.Enrolled(2.0, "a", 1, "r" * 64, "certificate", {}, None, "")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = EventLog(tmp_path)
    yield opened
    opened.close()


def run_log(log: EventLog, deciding: Callable[[e.Event], None], seen: list[str]) -> RunLog:
    """A run of one site that begins with it; `seen`: events that were applied."""
    clock, state = Clock(), CoordinatorState(CONFIG)
    return RunLog(
        state, log, 1, clock, clock, deciding, lambda event, *_: seen.append(type(event).__name__)
    )


def test_an_event_is_logged_with_all_that_follows_from_it(log: EventLog) -> None:
    seen: list[str] = []
    run = run_log(log, lambda event: None, seen)
    run.append(CREATED)
    run.append(ENROLLED)
    assert seen == ["Created", "Enrolled", "Started"]
    assert [type(event).__name__ for event in log.events()] == seen
    assert run.state.phase == "starting"
    assert restored(CONFIG, log) == run.state


def test_an_event_that_is_refused_changes_nothing(log: EventLog) -> None:
    """The record writes what it needs before the log: if its disk is full, nothing has happened."""
    seen: list[str] = []

    def refuse(event: e.Event) -> None:
        raise TrainingError("the disk is full")

    run = run_log(log, refuse, seen)
    with pytest.raises(TrainingError, match="full"):
        run.append(CREATED)
    assert (seen, log.last, run.state.digest) == ([], 0, "")
