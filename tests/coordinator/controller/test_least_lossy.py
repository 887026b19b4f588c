"""Plans that are left out unseen are none that the controller would have chosen."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller import link_policy
from dilocox.coordinator.controller.candidates import Candidate, candidates, least_loss
from dilocox.coordinator.controller.link_estimator import Estimate
from dilocox.coordinator.controller.link_policy import FEWER_WORTH, least_lossy_that_fits
from tests.support.controller_inputs import menu, run_config

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


def by_the_rule(fitting: list[Candidate]) -> Candidate | None:
    """The choice among plans that fit, as docs/algorithm.md has it: the least loss, and fewer
    fragments only for `FEWER_WORTH` less of it."""
    most = max((c.fragments for c in fitting), default=0)
    return min(
        fitting,
        key=lambda c: (
            c.loss + FEWER_WORTH * (c.fragments < most),
            c.load,
            c.inner_steps,
            -c.fragments,
        ),
        default=None,
    )


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    """Links and machines of all kinds, with works and overheads that were measured of some."""
    works = draw(
        st.dictionaries(
            st.sampled_from(["int4", "int2", "topk:82", "top1:100"]), st.integers(0, 500_000)
        )
    )
    overheads = draw(st.dictionaries(st.sampled_from([1, 2, 4]), st.integers(0, 200_000)))
    return Estimate(
        step_us=draw(st.integers(1_000, 2_000_000)),
        rate=round(10 ** draw(st.floats(3.5, 9.5))),
        latency_us=draw(st.sampled_from([0, 30_000])),
        payload=10_000,
        overheads=overheads,
        work_us=draw(st.integers(0, 100_000)),
        works=works,
        lag_us=draw(st.sampled_from([0, 5_000])),
    )


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    control: dict[str, Any] = draw(
        st.sampled_from([{}, {"link": "1gbit", "step_seconds": 1.0, "latency": 0.02}])
    )
    return run_config(
        steps=draw(st.sampled_from([60, 600, 3300])),
        outer={
            "exchange": draw(st.sampled_from(["gather", "reduce"])),
            "fragments": draw(st.sampled_from([1, 3, 4])),
            **draw(st.sampled_from([{}, {"delay": 2}])),
        },
        site={"stages": draw(st.integers(1, 2))},
        control=control,
    )


@PROPERTY
@given(configs(), estimates(), st.integers(2, 6), st.sampled_from([0, 40]))
def test_the_choice_is_that_of_all_that_fit(
    config: RunConfig, link: Estimate, sites: int, taken: int
) -> None:
    sizes = menu(config)
    fitting = [c for c in candidates(config, sizes, link, sites, taken=taken) if c.fits]
    assert least_lossy_that_fits(config, sizes, link, sites, taken) == by_the_rule(fitting)


@PROPERTY
@given(configs(), estimates())
def test_no_plan_loses_less_than_one_that_lands_at_once(config: RunConfig, link: Estimate) -> None:
    sizes = menu(config)
    for each in candidates(config, sizes, link, 2):
        assert least_loss(config, each.codec, each.inner_steps) <= each.loss + 1e-12


def test_hundreds_of_plans_are_left_out(monkeypatch: Any) -> None:
    """On a link that leaves a choice, few of them are followed through their exchanges."""
    config = run_config()
    sizes = menu(config)
    link = Estimate(100_000, 100_000, 0, 0)
    every = len(candidates(config, sizes, link, 2))
    assert every > 300
    asked: list[tuple[str, int]] = []
    real = link_policy.of_length

    def counted(*given: Any) -> list[Candidate]:
        asked.append(given[-2:])
        return real(*given)

    monkeypatch.setattr(link_policy, "of_length", counted)
    assert least_lossy_that_fits(config, sizes, link, 2) is not None
    assert len(asked) < every / 5
