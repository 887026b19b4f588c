"""Run files of the methods, and what is made of a run's records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.wan import run as wan_run
from benchmarks.wan.grid import BY_NAME, LIGHT, METHODS, NO_EXCHANGE, OURS, SITES

from dilocox.config.run_config import RunConfig
from dilocox.tools.testbed import LabError
from dilocox.tools.testbed.results import RunResult, SiteResult, Window

pytestmark = pytest.mark.runs

ENGINE = [method for method in METHODS if method.kind == "engine"]


@pytest.mark.parametrize("method", ENGINE, ids=lambda method: method.name)
@pytest.mark.parametrize("sites", [2, 4])
def test_every_method_has_a_run_file(method: Any, sites: int, tmp_path: Path) -> None:
    settings = wan_run.engine_settings(method, sites)
    config = wan_run.configuration(tmp_path, sites, settings, steps=1000)
    assert config.outer.method == (OURS if method.adapts else method.name)
    if not method.adapts:
        assert config.outer.inner_steps == method.inner_steps
    assert list(config.sites) == list(SITES[:sites])
    assert config.network.link_timeout > 300
    dense = method.name in ("allreduce", "diloco", "opendiloco", "intellect1")
    if sites > 2 and dense:
        assert config.outer.exchange == "reduce"


def test_ours_is_as_shipped(tmp_path: Path) -> None:
    config = wan_run.configuration(tmp_path, 2, wan_run.engine_settings(BY_NAME[OURS], 2), 1000)
    assert config.control.adapt == "link"
    assert config.control.measures
    assert config.control.pinned == []
    light = wan_run.configuration(tmp_path, 2, wan_run.engine_settings(BY_NAME[LIGHT], 2), 1000)
    changed = config.control.model_copy(update={"work": 0.005})
    assert light == config.model_copy(update={"control": changed})


def test_a_site_on_a_slow_link_may_be_silent_for_longer(tmp_path: Path) -> None:
    # 32 frames of 1514 bytes take 2.28 s at 170 kbit/s, and 39 ms at 10 Mbit/s.
    slow = wan_run.configuration(tmp_path, 2, {}, 10, link=170e3)
    assert slow.network.heartbeat == pytest.approx(20 * 2.28, rel=0.01)
    fast = wan_run.configuration(tmp_path, 2, {}, 10, link=10e6)
    assert fast.network.heartbeat == RunConfig.model_fields["network"].default.heartbeat


def test_no_exchange_has_nothing_but_steps_between_outer_steps(tmp_path: Path) -> None:
    config = wan_run.configuration(tmp_path, 2, NO_EXCHANGE, 600)
    assert config.compression.codec == "none"
    assert (config.outer.slots, config.outer.fragments, config.outer.delay) == (1, 1, 0)


def record(site: str, number: int, steps: int, end: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "round",
        "site": site,
        "round": number,
        "steps": steps,
        "step": end,
        **more,
    }


def test_the_first_measured_round_begins_after_half_of_the_steps() -> None:
    ends = [(20, 20), (20, 40), (30, 70), (30, 100)]
    records = [
        record(site, number, steps, end)
        for number, (steps, end) in enumerate(ends)
        for site in ("paris", "lyon")
    ]
    assert wan_run.first_after(records, ["paris", "lyon"], 40) == 2
    assert wan_run.first_after(records, ["paris", "lyon"], 41) == 3
    with pytest.raises(LabError, match="too short"):
        wan_run.first_after(records, ["paris", "lyon"], 80)


def test_efficiency_is_of_payloads_that_the_link_has_carried() -> None:
    # 1 MB in 4.5 s is 1.78 of 2 Mbit/s; in 10 ms it has not been on that link.
    assert wan_run.efficiency(1e6, 4.5, 2e6) == pytest.approx(0.889, abs=1e-3)
    assert wan_run.efficiency(1e6, 0.01, 2e6) is None
    assert wan_run.efficiency(0, 0.0, 2e6) is None


def plan(number: int, codec: str, reason: str) -> dict[str, Any]:
    return {
        "kind": "plan",
        "round": number,
        "codec": codec,
        "inner_steps": 20,
        "fragments": 4,
        "delay": 5,
        "reason": reason,
    }


def test_a_row_is_of_the_measured_rounds_alone(tmp_path: Path) -> None:
    plans = [plan(0, "int4", "first"), plan(2, "topk:64", "second"), plan(5, "int2", "later")]
    rounds = [
        record(
            site,
            number,
            20,
            20 * number + 20,
            link_bytes=10_000,
            link_seconds=0.1 if number else 99.0,
            exchange_work_seconds=0.02,
        )
        for number in range(4)
        for site in ("paris", "lyon")
    ]
    site = SiteResult(1000.0, 0.25, 0, 0, 0, 300.0, 400.0)
    result = RunResult(
        name="wan",
        method=OURS,
        window=Window(1, 3, 100.0, 106.0),
        sites={"paris": site, "lyon": site},
        control_bytes=0,
        control_per_round=0.0,
        exchange_wire_bytes=0,
        summary={},
        records=[*plans, *rounds],
        folder=tmp_path,
    )
    row = wan_run.engine_row(result, link=1e6)
    assert row["tokens_per_second"] == 2000.0
    assert row["steps"] == 60
    assert row["inner_steps"] == 20
    # 60 kB in 0.6 s are 0.8 Mbit/s.
    assert row["efficiency"] == pytest.approx(0.8)
    assert row["work_share"] == pytest.approx(3 * 0.02 / 6)
    assert (row["payload_bytes"], row["wire_bytes"], row["wait_share"]) == (300.0, 400.0, 0.25)
    assert row["plan"] == "int4 H=20 F=4 delay=5 x1, topk:64 H=20 F=4 delay=5 x2"
    assert row["reason"] == "second"
