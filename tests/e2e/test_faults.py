"""What goes wrong: values that are not finite, interrupts, ranks that die or hang, full disks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.forked import Forge
from tests.e2e.harness import Workshop

LONG = ("outer.rounds=400", "checkpoint.every_rounds=2")


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    forge = Forge()
    yield forge
    forge.close()


def test_a_sick_round_is_dropped(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "sick-once", "outer.rounds=4", hooks="sick-once")
    assert run.wait() == 0, run.output()
    dropped = {r["round"]: r["dropped"] for r in run.records("round", "lyon") if "dropped" in r}
    assert list(dropped) == [1]
    assert not any("dropped" in r for r in run.records("round", "paris"))
    print(dropped, run.printed())


def test_ctrl_c_in_a_terminal(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(workshop, "interrupted", *LONG)
    run.until_round(1)
    run.ctrl_c()
    assert run.wait() == 130, run.output()
    assert "--resume" in run.printed()
    assert not run.left_behind()
