"""Following runs to their ends, without a lab."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.config.run_config import resolve_run
from dilocox.tools.testbed import LabError
from dilocox.tools.testbed.run import alone, finish, of_sites

pytestmark = pytest.mark.alone


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


def test_sites_are_taken_out_of_a_run() -> None:
    sites: dict[str, Any] = {"paris": {}, "lyon": {"batch_size": 4}, "nice": {}}
    raw = {"model": {"path": "x"}, "site": {"batch_size": 8}, "outer": {"min_sites": 3}}
    config = resolve_run({**raw, "sites": sites})
    found = of_sites(config, ["nice", "lyon"])
    assert list(found.sites) == ["nice", "lyon"]
    assert (found.sites["lyon"].batch_size, found.outer.min_sites) == (4, 2)
    assert found.folder == config.folder
    single = alone(config, "lyon")
    assert (list(single.sites), single.outer.min_sites) == (["lyon"], 1)
    assert str(single.folder) == f"{config.folder}-lyon"
