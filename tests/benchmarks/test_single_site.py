"""The alternation: whose turn it is, and that no two sides compute at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.single_site import measurement
from benchmarks.single_site.command import LARGE, SMALL, content
from benchmarks.single_site.sides import Turn

import dilocox
from dilocox.training.loop.parts import check_loop


class FakeSide:
    """A side that takes `seconds` per turn and writes down what happens."""

    def __init__(self, name: str, seconds: float, said: list[str]) -> None:
        self.name = name
        self.process = SimpleNamespace(pid=0)
        self._seconds = seconds
        self._said = said

    def go(self) -> None:
        self._said.append(f"{self.name} begins")

    def arrived(self) -> Turn:
        self._said.append(f"{self.name} waits")
        return Turn(self._seconds, 1000, None)


@pytest.fixture
def fixed_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(measurement.common, "cpu_seconds", lambda _process: float(next(clock)))


def test_turns_alternate_and_the_first_ones_do_not_count(fixed_cpu: None) -> None:
    said: list[str] = []
    sides: dict[str, Any] = {
        "plain": FakeSide("plain", 2.0, said),
        "dilocox": FakeSide("dilocox", 2.5, said),
    }
    result = measurement.alternate(sides, pairs=2, tokens=1000)
    assert result.rates == {"plain": [500.0, 500.0], "dilocox": [400.0, 400.0]}
    order = ["plain", "dilocox", "dilocox", "plain", "plain", "dilocox"]
    expected = ["plain waits", "dilocox waits"]
    for name in order:
        expected += [f"{name} begins", f"{name} waits"]
    assert said == expected


def test_rows_hold_the_ratio_of_pairs() -> None:
    result = measurement.Result(
        rates={"plain": [100.0, 50.0, 200.0], "dilocox": [98.0, 49.0, 190.0]},
        cpu={"plain": [1.0, 1.0, 1.0], "dilocox": [1.25, 1.25, 1.25]},
        peak={"plain": 10, "dilocox": 12},
        idle_share=0.0,
        plain_loss=None,
    )
    plain, dilocox = measurement.rows_of(result, "bf16", "cpu")
    assert plain["ratio"] == 1.0
    assert dilocox["ratio"] == pytest.approx(0.98)
    assert dilocox["cpu_ratio"] == pytest.approx(0.8)
    assert (plain["peak_bytes"], dilocox["peak_bytes"]) == (10, 12)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("shape", [LARGE, SMALL])
def test_the_runs_resolve(tmp_path: Path, shape: dict[str, Any], own_loop: bool) -> None:
    asked = content(shape, tmp_path, "auto", rounds=3, own_loop=own_loop)
    config = dilocox.resolve_run(asked)
    assert config.site.stages == 1
    assert list(config.sites) == ["here"]
    assert config.outer.method == "dilocox"
    if own_loop:
        check_loop(config, "here")
