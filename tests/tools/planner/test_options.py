"""What a plan tries by itself: named where it fits and buys something, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.planned_runs import device, run

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.choice import as_the_run_file_says
from dilocox.errors import ConfigError
from dilocox.tools.planner.core_plan import CorePlan
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.host_memory import HostMemory
from dilocox.tools.planner.options import Option, loss_rise, options
from dilocox.tools.planner.predict import Prediction


def prediction(speed: float, steps: int, codec: str = "int8") -> Prediction:
    choice = replace(
        as_the_run_file_says(run()), inner_steps=steps, slots=steps, delay=1, codec=codec
    )
    return cast(Prediction, SimpleNamespace(tokens_per_second=speed, choice=choice))


def tried(
    config: RunConfig, with_it: Prediction, needed: int = 5, sites: int = 2, **kind: Any
) -> list[Option]:
    places = [GpuPlacement(device(**kind), 4, 1)] * sites
    return options(own(config), places, lambda *_: planned(config, with_it, needed))


def planned(config: RunConfig, found: Prediction, needed: int, host: Any = None) -> CorePlan:
    """A plan on devices of 10 bytes."""
    place = GpuPlacement(device(memory=10), 4, 1)
    nothing = cast(Any, None)
    return CorePlan(config, nothing, found, place, [], needed, host, nothing)


def own(config: RunConfig) -> CorePlan:
    return planned(config, prediction(100.0, 80), 5)


def test_less_loss_at_the_same_speed_is_worth_it() -> None:
    found = tried(run(), prediction(100.0, 5))
    assert [each.text for each in found] == ["--set outer.device=model"]
    assert found[0].loss is not None
    assert found[0].loss < (loss_rise(run(), prediction(100.0, 80).choice) or 0)
    assert (found[0].needed, found[0].available) == (5, 10)


@pytest.mark.parametrize(
    ("speed", "steps", "needed"),
    [(100.0, 80, 5), (100.5, 80, 5), (90.0, 5, 5), (150.0, 5, 11)],
    ids=["the same", "hardly faster", "less loss for a tenth of the speed", "does not fit"],
)
def test_what_buys_nothing_is_not_named(speed: float, steps: int, needed: int) -> None:
    assert tried(run(), prediction(speed, steps), needed) == []


def test_only_what_the_run_does_not_have_is_tried() -> None:
    faster = prediction(130.0, 80)
    assert [each.key for each in tried(run(), faster)] == ["outer.device"]
    assert [each.key for each in tried(run(), faster, sites=3)] == [
        "outer.device", "outer.exchange",
    ]  # fmt: skip
    assert tried(run(outer={"steps": 4000, "device": "model"}), faster) == []
    assert tried(run(), faster, sites=1) == []
    assert tried(run(), faster, shared=True) == []


def test_what_cannot_be_is_left_out() -> None:
    def refuses(*_: object) -> CorePlan:
        raise ConfigError("cannot be")

    places = [GpuPlacement(device(), 4, 1)] * 2
    assert options(own(run()), places, refuses) == []


def test_what_would_fill_the_hosts_is_left_out() -> None:
    """If the hosts are too small in any case, the page says so, and a change does no harm."""
    full = HostMemory(GpuPlacement(device(), 4, 1), ranks=4, needed=2, available=1)
    faster, places = prediction(130.0, 80), [GpuPlacement(device(), 4, 1)] * 2
    filling = planned(run(), faster, 5, full)
    assert options(own(run()), places, lambda *_: filling) == []
    before = planned(run(), prediction(100.0, 80), 5, full)
    assert len(options(before, places, lambda *_: filling)) == 1


def test_gradients_have_no_predicted_loss() -> None:
    gradients = run(outer={"steps": 4000, "method": "allreduce"})
    assert loss_rise(gradients, as_the_run_file_says(gradients)) is None
