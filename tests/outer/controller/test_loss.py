"""The loss table: sound by itself, and read between its points as it says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.outer.controller.loss import (
    codec_loss,
    kept_progress,
    loss_of,
    outer_rates,
    residual_decay,
    residual_view,
    table,
)

STEPS = table()["inner_steps"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_table_is_sound(optimizer: str) -> None:
    known = table(optimizer)
    rates = known["outer"]["flat"], known["outer"]["topk"]
    columns = [known["local"], *known["flat"].values()]
    columns += [of[name] for of in rates for name in ("learning_rate", "momentum")]
    assert sorted(STEPS) == STEPS
    for column in (*columns, known["delay"]["loss"], known["topk"]["loss"]):
        assert len(column) == len(STEPS)
    for row in known["delay"]["loss"]:
        assert len(row) == len(known["delay"]["share"])
        assert sorted(row) == row
    for row in known["topk"]["loss"]:
        assert len(row) == len(known["topk"]["kept"])
        assert sorted(row, reverse=True) == row
        assert min(row) > 0  # its logarithm is taken
    assert sorted(known["local"]) == known["local"]
    for codec in ("none", *(f"topk:{kept}" for kept in known["topk"]["kept"])):
        for steps in STEPS:
            for whole in (1, 640, 10**6):
                rate, momentum = outer_rates(steps, codec, whole)
                assert 0.5 <= rate / (1 - momentum) <= 4


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 2000), st.integers(1, 2047), st.floats(0, 1))
def test_more_bits_and_less_delay_never_cost(steps: int, kept: int, share: float) -> None:
    flat = [codec_loss(steps, codec) for codec in ("none", "int8", "int4", "int2")]
    assert flat == sorted(flat)
    assert codec_loss(steps, f"topk:{kept}") >= codec_loss(steps, f"topk:{kept + 1}")
    assert loss_of(steps, "int4", share) >= loss_of(steps, "int4", 0.0)
    assert loss_of(steps, "none", share) >= 0


def test_points_of_the_table_and_between_them() -> None:
    known = table()
    assert loss_of(5, "none", 0.0) == known["local"][2]
    assert loss_of(20, "none", 0.25) == pytest.approx(
        known["local"][4] + known["delay"]["loss"][4][1]
    )
    between = math.sqrt(10 * 20)
    whole = round(between)
    share = math.log(whole / 10) / math.log(2)
    low, high = known["local"][3:5]
    assert loss_of(whole, "none", 0.0) == pytest.approx(low + (high - low) * share)
    row = known["topk"]["loss"][2]
    middle = codec_loss(5, "topk:58")  # between 41 and 82: log-log
    exact = row[3] * (row[4] / row[3]) ** (math.log(58 / 41) / math.log(82 / 41))
    assert middle == pytest.approx(exact)
    # Beyond the ends the last one holds; unknown codecs count as lossless.
    assert loss_of(5000, "none", 0.0) == known["local"][-1]
    assert codec_loss(5, "topk:2048") == pytest.approx(row[-1])
    assert codec_loss(5, "bf16") == 0.0


def test_what_is_known_of_an_optimizer_holds_instead_and_the_rest_is_adamws() -> None:
    muon, adamw = table("muon"), table()
    assert table("sgd") == adamw
    assert muon["delay"] == adamw["delay"]
    assert loss_of(5, "none", 0.0, "muon") == pytest.approx(muon["local"][2])
    assert codec_loss(5, "topk:82", "muon") == pytest.approx(muon["topk"]["loss"][2][4])
    # Muon loses little to long rounds and much to few values.
    assert loss_of(20, "int2", 0.25, "muon") < loss_of(20, "int2", 0.25)
    assert loss_of(2, "topk:20", 0.5, "muon") > loss_of(2, "topk:20", 0.5)


def test_what_goes_with_the_inner_steps() -> None:
    assert outer_rates(1, "none", 640) == (1.0, 0.0)
    assert outer_rates(20, "none", 640) == (0.8, 0.5)
    # What top-k withholds decays in the residual: the fewer values travel, the more they count.
    assert outer_rates(2, "topk:82", 640) == (0.8, 0.5)
    assert outer_rates(2, "topk:10", 640) == (1.6, 0.5)
    assert outer_rates(5, "topk:5", 640) == (2.0, 0.5)
    assert outer_rates(5, "lowrank:8", 640) == outer_rates(5, "none", 640)
    assert [residual_view(2, codec) for codec in ("topk:64", "int2", "none")] == [0.2, 0.0, 0.0]
    assert residual_view(5, "topk:64", "muon") == 0.2
    assert residual_view(2, "topk:64") > residual_view(3, "topk:64") > residual_view(8, "topk:64")
    assert [kept_progress(*case) for case in ((20, 1.0), (20, 0.5), (5, 1.0))] == [0.65, 1.0, 1.0]
    sparse = [kept_progress(*case, "topk:82") for case in ((5, 1.0), (5, 0.5), (3, 1.0))]
    assert sparse == [0.65, 1.0, 1.0]


def test_longer_runs_forget_less_of_the_residual_and_raise_gamma_less_for_it() -> None:
    assert [residual_decay("topk:64", steps) for steps in (1, 640)] == [0.95, 0.95]
    assert [residual_decay("topk:64", steps) for steps in (3300, 10**6)] == [0.98, 0.98]
    # Half way between them in the logarithm.
    assert residual_decay("topk:64", 1453) == pytest.approx(0.965, abs=1e-4)
    assert [residual_decay(codec, 3300) for codec in ("lowrank:8", "int2", "none")] == [1, 1, 1]
    # Two fifths as much decays: two fifths of what gamma was raised by.
    assert [outer_rates(2, "topk:10", steps)[0] for steps in (640, 3300)] == [1.6, 1.12]
    assert outer_rates(2, "topk:82", 3300) == outer_rates(2, "topk:82", 640)
