"""Following runs to their ends, without a lab."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.lab import LabError
from dilocox.lab.running import finish


class FakeRun:
    """A run whose one process ends when `over` is true."""

    def __init__(self, handle: int, over: bool = False) -> None:
        self.config: Any = SimpleNamespace(run=SimpleNamespace(name="wan"))
        self.handle, self.over, self.ended = handle, over, False

    @property
    def sentinels(self) -> list[int]:
        return [] if self.over else [self.handle]

    def check(self) -> None:
        return

    def sample(self) -> None:
        return

    def new_records(self) -> list[Any]:
        return []

    def end(self) -> None:
        self.ended = True


def test_a_run_that_hangs_is_ended_at_its_limit() -> None:
    lab: Any = SimpleNamespace(delay=None)
    reading, writing = os.pipe()
    try:
        hangs: Any = FakeRun(reading)
        with pytest.raises(LabError, match=r"run wan has not ended after 0 s"):
            finish(lab, [hangs], limit=0.05)
        assert hangs.ended
        done: Any = FakeRun(reading, over=True)
        finish(lab, [done], limit=0.0)
        assert done.ended
    finally:
        os.close(reading)
        os.close(writing)
