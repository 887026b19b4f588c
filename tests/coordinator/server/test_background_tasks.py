"""Tasks in a coordinator's background: what they raise is said in one line, and they go on."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from dilocox.coordinator.server.background_tasks import repeat, say_if_it_dies
from dilocox.errors import TrainingError
from tests.support.served_run import Run

pytestmark = pytest.mark.waits


def test_what_a_task_raises_is_said_once_and_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = [OSError(28, "full"), OSError(28, "full"), None, TrainingError("no disk"), None]
    seen = 0

    def call() -> None:
        nonlocal seen
        seen += 1
        outcome = outcomes[seen - 1]
        if seen == len(outcomes):
            raise asyncio.CancelledError
        if outcome is not None:
            raise outcome

    with pytest.raises(asyncio.CancelledError), caplog.at_level(logging.WARNING):
        asyncio.run(repeat(call, 0.0, "the look"))
    assert [record.getMessage() for record in caplog.records] == [
        "internal error in the look: OSError(28, 'full'); tried again",
        "coordinator: the look goes on",
        "no disk",
    ]


def test_a_task_that_dies_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        raise ValueError("no such thing")

    async def run() -> None:
        task = asyncio.create_task(failing())
        say_if_it_dies(task, "the door")
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(run())
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said == "coordinator: internal error in the door: ValueError('no such thing')"


def test_dead_ranks_are_looked_for_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody has thought of ended the task, and dead sites were never noticed."""
    looks = 0

    def failing(self: object) -> None:
        nonlocal looks
        looks += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dilocox.coordinator.server.service.Coordinator.expire", failing)
    monkeypatch.setattr("dilocox.coordinator.server.http_server.LOOKS", 0.001)
    run = Run(tmp_path)
    try:

        async def twice() -> None:
            while looks < 2:
                await asyncio.sleep(0)

        run.call(asyncio.wait_for(twice(), 10))
    finally:
        run.close()
