"""Predicted speeds: by hand, and what must hold for any link and number of sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planned_runs import TABLE, device, link, run

from dilocox.config.methods import METHODS
from dilocox.config.run_config import RunConfig, with_sites
from dilocox.errors import ConfigError
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.predict import Prediction, Simulation, menu_of, predict
from dilocox.tools.planner.variants import with_method

OUTLINE = ModelOutline.of(run())
SOME = settings(max_examples=12, deadline=None, derandomize=True)


def fixed(method: str, **outer: Any) -> RunConfig:
    return run(outer={"steps": 10**6, "method": method, **outer}, control={"adapt": "off"})


def of(config: RunConfig, rate: float, sites: int = 2, step: float = 1.0) -> Prediction:
    return predict(
        config,
        device(),
        link(rate),
        sites,
        step_seconds=step,
        simulation=Simulation(rounds=6),
        outline=OUTLINE,
    )


def test_synchronous_training_by_hand() -> None:
    found = of(fixed("allreduce", exchange="reduce"), rate=1e4, sites=4)
    payload = sum(
        each.payload for row in menu_of(fixed("allreduce"), OUTLINE)["none"] for each in row
    )
    # A ring: 2 x 3/4 of the gradients in and out of each site, in every step.
    assert found.payload_bytes / found.choice.inner_steps == pytest.approx(1.5 * payload, rel=1e-3)
    step = 1.0 + 1.5 * payload / 1e4
    assert found.tokens_per_second == pytest.approx(4 * 8 * 16 / step, rel=1e-3)
    assert found.alone == pytest.approx(4 * 8 * 16)
    assert found.share == pytest.approx(1 / step, rel=1e-3)


def test_payloads_are_the_controllers_own_figures() -> None:
    found = of(fixed("diloco"), rate=1e6)
    payload = sum(each.payload for row in menu_of(fixed("diloco"), OUTLINE)["none"] for each in row)
    assert found.payload_bytes == payload
    assert found.exchange_seconds == pytest.approx(payload / 1e6, rel=1e-3)
    per_token = 2 * payload / (500 * 2 * 8 * 16)
    assert found.payload_per_token == pytest.approx(per_token)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_predicted(method: str) -> None:
    config = with_method(run(), method, hidden_size=32)
    found = of(config, rate=1e5)
    assert config.outer.method == method
    assert 0 < found.tokens_per_second <= found.alone * (1 + 1e-9)
    assert found.choice.codec == ("lowrank:8" if method == "dilocox-paper" else found.choice.codec)


def test_the_adaptive_plan_hides_what_a_fixed_one_does_not() -> None:
    config, rate = run(outer={"steps": 10**6}), 6e2
    adaptive = predict(config, device(), link(rate), 2, step_seconds=1.0, outline=OUTLINE)
    pinned = of(fixed("dilocox"), rate)
    assert pinned.share < 0.9
    assert adaptive.share > 0.97
    assert "predicted loss" in adaptive.choice.reason


def test_a_codec_that_is_only_begun_with_can_be_planned() -> None:
    """The controller does not know what it loses, so it leaves it when it has measured."""
    begun = run(outer={"steps": 10**6}, compression={"codec": "cocktail"}, control={"pinned": []})
    found = of(begun, rate=1e5)
    assert found.course.choices[0].codec == "cocktail"
    assert found.choice.codec != "cocktail"


def test_a_declared_link_is_planned_by() -> None:
    config = run(outer={"steps": 10**6}, control={"link": "8kbit", "step_seconds": 1.0})
    found = of(config, rate=1e3)
    assert "at 8 kbit/s and 1 s a step" in found.choice.reason
    # Nothing was waited for: the first plan is already by the declared link.
    assert found.course.choices[0] == found.choice


def test_sites_of_their_own() -> None:
    config = run(
        outer={"steps": 10**6, "method": "diloco"}, sites={"a": {}, "b": {"batch_size": 4}}
    )
    found = predict(
        config, device(), [link(1e4), link(1e3)], ["a", "b"], step_seconds=[1.0, 2.0],
        outline=OUTLINE,
    )  # fmt: skip
    assert found.tokens_per_step == 12 * 16
    assert found.step_seconds == 2.0
    assert [site.rate for site in found.course.sites] == pytest.approx([1e4, 1e3])
    with pytest.raises(ConfigError, match="2 sites need one or 2 links, not 3"):
        predict(config, device(), [link(1e4)] * 3, 2, outline=OUTLINE)


def test_uneven_sites_as_shipped_do_not_wait_for_the_slowest() -> None:
    def two(**control: str) -> Prediction:
        config = run(outer={"steps": 10**6}, control=control)
        return predict(
            config, device(), link(1e5), ["a", "b"], step_seconds=[1.0, 2.0], outline=OUTLINE
        )

    found, equal = two(), two(steps="equal")
    tokens = 8 * 16
    assert found.alone == pytest.approx(1.5 * tokens)
    assert found.tokens_per_second == pytest.approx(1.5 * tokens, rel=0.01)
    assert equal.alone == pytest.approx(tokens)
    assert equal.tokens_per_second == pytest.approx(tokens, rel=0.01)
    # Of the three steps that both take in the time of two, the fast site makes two.
    per_round = 2 * found.payload_bytes / found.payload_per_token
    assert per_round == pytest.approx(1.5 * found.choice.inner_steps * tokens, rel=0.01)


def test_without_a_measured_step_the_cost_model_has_one() -> None:
    config = fixed("diloco", inner_steps=10)
    found = predict(config, device(), link(1e9), 2, outline=OUTLINE)
    operations = OUTLINE.flops_per_token * 8 * 16
    optimizer = 28 * OUTLINE.parameters / 1e12
    assert found.step_seconds == pytest.approx(operations / 1e12 + optimizer)


def test_names_of_sites() -> None:
    assert list(with_sites(run(), 1).sites) == ["lyon"]
    assert list(with_sites(run(), 4).sites) == ["lyon", "paris", "site3", "site4"]
    assert list(with_sites(run(), ["x", "paris"]).sites) == ["x", "paris"]
    paid = {name: "0x" + str(n) * 40 for n, name in enumerate(("lyon", "paris"), 1)}
    tasks = {"every_rounds": 1, "tasks": ["arc_easy"], "tasks_site": "paris"}
    whole = run(settlement={"price": 5, "accounts": paid}, evaluation=tasks)
    found = with_sites(whole, 1)
    assert found.settlement is not None
    assert (list(found.settlement.accounts), found.evaluation.tasks_site) == (["lyon"], None)
    assert with_sites(whole, 4).settlement == whole.settlement


RATES = st.floats(1e2, 1e7)
FIXED: dict[str, Callable[[], RunConfig]] = {
    "none": lambda: fixed("diloco", inner_steps=20),
    "naive": lambda: fixed("diloco", inner_steps=20, overlap="naive"),
    "keep": lambda: fixed("dilocox", inner_steps=20, delay=5),
    "allreduce": lambda: fixed("allreduce"),
}


@pytest.mark.parametrize("name", FIXED)
@SOME
@given(rate=RATES, factor=st.floats(1.0, 100.0))
def test_a_faster_link_is_never_slower(name: str, rate: float, factor: float) -> None:
    config = FIXED[name]()
    slow, fast = of(config, rate), of(config, rate * factor)
    assert fast.tokens_per_second >= slow.tokens_per_second * (1 - 1e-6)
    assert fast.tokens_per_second <= fast.alone * (1 + 1e-6)


@pytest.mark.parametrize("name", FIXED)
@SOME
@given(rate=RATES, step=st.floats(1e-3, 10.0), factor=st.floats(1.0, 20.0))
def test_a_slower_step_is_never_faster(name: str, rate: float, step: float, factor: float) -> None:
    config = FIXED[name]()
    fast, slow = of(config, rate, step=step), of(config, rate, step=step * factor)
    assert slow.tokens_per_second <= fast.tokens_per_second * (1 + 1e-6)
    # A slower step has more time to hide behind.
    assert slow.share >= fast.share * (1 - 1e-6)


@SOME
@given(sites=st.integers(2, 8), more=st.integers(1, 8))
def test_more_sites_mean_more_payload_to_everyone_and_hardly_more_in_parts(
    sites: int, more: int
) -> None:
    everyone = [of(fixed("diloco"), 1e6, count).payload_bytes for count in (sites, sites + more)]
    assert everyone[1] / everyone[0] == pytest.approx((sites + more - 1) / (sites - 1))
    parts = [
        of(fixed("diloco", exchange="reduce"), 1e6, count).payload_bytes
        for count in (sites, sites + more)
    ]
    assert parts[0] < parts[1] * (1 + 1e-3)
    assert parts[1] <= 2 * everyone[0] / (sites - 1)


@SOME
@given(rate=RATES, sites=st.integers(1, 8))
def test_overlap_never_costs_speed(rate: float, sites: int) -> None:
    waiting = of(FIXED["none"](), rate, sites)
    hidden = of(FIXED["naive"](), rate, sites)
    assert hidden.tokens_per_second >= waiting.tokens_per_second * (1 - 1e-6)


def test_the_packages_own_devices_can_be_used() -> None:
    found = predict(run(), TABLE.device("l40s"), TABLE.link("100mbit"), 2, outline=OUTLINE)
    assert found.tokens_per_second > 0
