"""One global batch, whoever is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.coordinator.controller.batch import shared_batches
from dilocox.errors import ConfigError
from tests.support.coordinator_driver import Driver, numbers, run_config

FIXED = {"global_batch": "fixed"}


def test_by_hand() -> None:
    batches = {"a": 16, "b": 16, "c": 8}
    assert shared_batches(batches, ["a", "b", "c"], 4) == batches
    assert shared_batches(batches, ["a", "b"], 4) == {"a": 20, "b": 20}
    # c's 8 in proportion 2 to 1: five units and a third for a, two and two thirds for c.
    assert shared_batches({"a": 16, "b": 32, "c": 8}, ["a", "c"], 4) == {"a": 36, "c": 20}
    assert shared_batches({"a": 4, "b": 4, "c": 4}, ["b", "c"], 4) == {"b": 8, "c": 4}
    assert shared_batches(batches, ["c"], 4) == {"c": 40}


@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 9), min_size=1),
    st.integers(1, 12),
    st.data(),
)
def test_it_is_exact_in_whole_units_and_nobody_takes_less(
    units: dict[str, int], unit: int, data: st.DataObject
) -> None:
    batches = {site: unit * count for site, count in units.items()}
    members = data.draw(st.lists(st.sampled_from(sorted(batches)), min_size=1, unique=True))
    found = shared_batches(batches, members, unit)
    assert list(found) == members
    assert sum(found.values()) == sum(batches.values())
    assert all(found[site] % unit == 0 and found[site] >= batches[site] for site in members)


def test_plans_keep_to_it_while_a_site_is_away(tmp_path: Path) -> None:
    """And no sequence is given out twice."""
    config = run_config("abc", outer=FIXED, site={"micro_batch_size": 4})
    driver = Driver(tmp_path, config)
    driver.start()
    sequences = []
    for round_ in range(4):
        if round_ == 1:
            driver.leave("b")
        if round_ == 3:
            driver.join("b")
        plan = driver.plan(round_, "a")
        assert plan is not None
        sequences.append({site: member.batch for site, member in plan.members.items()})
        assert len(numbers(plan)) == len(set(numbers(plan))) == 12 * plan.inner_steps
        # Averages weigh by what was trained on.
        weights = {site: member.weight for site, member in plan.members.items()}
        mean = 12 / len(weights)
        assert weights == {site: sequences[-1][site] / mean for site in weights}
        for site in plan.members:
            driver.round_done(site, round_)
    assert sequences == [
        {"a": 4, "b": 4, "c": 4},
        {"a": 8, "c": 4},
        {"a": 8, "c": 4},
        {"a": 4, "b": 4, "c": 4},
    ]
    driver.core.close()


def test_it_goes_with_equal_steps_and_without_gpipe() -> None:
    assert run_config(outer=FIXED, control={"adapt": "link"}).control.steps == "equal"
    with pytest.raises(ConfigError, match=r'set steps = "equal"'):
        run_config(outer=FIXED, control={"steps": "by-speed"})
    with pytest.raises(ConfigError, match=r'set site.schedule = "1f1b"'):
        run_config(stages=2, outer=FIXED, site={"schedule": "gpipe"})
