"""The cost of a run against one cluster with a fast network."""

from __future__ import annotations

import pytest
from tests.support.planned_runs import device, link, run
from tests.tools.planner.test_plan import planned

from dilocox.tools.planner.comparison import at_price, compare
from dilocox.tools.planner.hardware_table import GpuPlacement
from dilocox.tools.planner.plan import plan_run
from dilocox.tools.planner.render import compared


def test_a_cluster_needs_the_time_without_exchanges() -> None:
    plan = planned(methods=(), tokens=1e9)
    found = compare(plan, 2.0)
    assert plan.prediction.share < 1
    gpus = sum(place.gpus for place in plan.places)
    alone = plan.prediction.tokens_per_second / plan.prediction.share
    assert found.gpus == gpus
    assert found.seconds == pytest.approx(1e9 / alone)
    assert found.usd == pytest.approx(gpus * 2.0 * 1e9 / alone / 3600)
    assert plan.budget.usd is not None
    assert found.saved == pytest.approx(1 - plan.budget.usd / found.usd)


def test_at_the_equal_price_nothing_is_saved() -> None:
    plan = planned(methods=())
    equal = compare(plan, 1.0).equal_usd_per_hour
    assert equal is not None
    again = compare(plan, equal)
    assert again.saved == pytest.approx(0.0, abs=1e-9)
    assert "this run costs 0.0% less" in compared(again) or "0.0% more" in compared(again)
    assert "costs 50.0% less" in compared(compare(plan, 2 * equal))
    assert "costs 100.0% more" in compared(compare(plan, equal / 2))


def test_a_cluster_that_costs_nothing_has_no_percentage() -> None:
    plan = planned(methods=())
    found = compare(plan, 0.0)
    assert (found.usd, found.saved) == (0.0, None)
    text = compared(found)
    assert "unknown" not in text
    assert "%" not in text
    equal = found.equal_usd_per_hour
    assert text.endswith(f"; this run costs the same if a GPU there cost ${equal:.2f} an hour")
    places = [GpuPlacement(device(usd_per_hour=None), 4, 1)] * 2
    unknown = plan_run(run(), places, [link(1e6)] * 2, 1e10, methods=())
    assert "the rent of this run is unknown (--rent USD)" in compared(compare(unknown, 0.0))


def test_prices_of_one_s_own_replace_those_of_the_table() -> None:
    places = [GpuPlacement(device(), 2, 1), GpuPlacement(device(usd_per_hour=None), 1, 1)]
    assert at_price(places, []) == places
    assert [place.device.usd_per_hour for place in at_price(places, [0.5])] == [0.5, 0.5]
    assert [place.device.usd_per_hour for place in at_price(places, [0.5, 3.0])] == [0.5, 3.0]
