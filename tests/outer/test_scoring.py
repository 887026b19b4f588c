"""What a rank finds in contributions: norms, directions, shares."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.coordinator.protocol.verdicts import WHOLE, RankOpinion
from dilocox.outer.layout import Layout
from dilocox.outer.loss_gate import Gate, GradientProbe
from dilocox.outer.scoring import examine, gram, rfa_shares

pytestmark = pytest.mark.waits


def test_norm_and_direction_by_hand() -> None:
    sent = {
        "a": torch.tensor([3.0, 4.0]),
        "b": torch.tensor([3.0, 4.0]) * 2,
        "c": -torch.tensor([3.0, 4.0]) * 10,
    }
    found = examine(sent, {"a": 1.0, "b": 2.0, "c": 1.0}, (0,), "mean")
    assert [each.norm for each in found.values()] == [1000, 1000, 10000]
    # Of a: the others point both ways, which is no direction.
    assert [each.cosine for each in found.values()] == [None, None, -1000]
    assert all(each.code == "admitted" and each.shares == [] for each in found.values())


def test_zero_is_found_and_has_no_direction() -> None:
    sent = {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(2)}
    found = examine(sent, dict.fromkeys("abc", 1.0), (0,), "clip")
    assert (found["a"].code, found["a"].norm, found["a"].cosine) == ("zero", 0, None)
    assert found["b"].cosine == 1000


def test_clip_is_to_the_median_norm_of_each_tensor() -> None:
    ones = torch.ones(128)
    sent = {
        "a": torch.cat([ones, 4 * ones]),
        "b": torch.cat([2 * ones, ones]),
        "c": torch.cat([8 * ones, 2 * ones]),
    }
    found = examine(sent, dict.fromkeys("abc", 1.0), (0, 128), "clip")
    half, quarter = WHOLE // 2, WHOLE // 4
    assert [each.shares for each in found.values()] == [
        [WHOLE, half], [WHOLE, WHOLE], [quarter, WHOLE],
    ]  # fmt: skip


@pytest.mark.parametrize("far", [1e2, 1e10, 1e30])
def test_the_geometric_median_stays_with_the_many(far: float) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [1 + 0.1 * torch.randn(64, generator=draw) for _ in range(6)]
    rows += [torch.full((64,), -far), torch.full((64,), far)]
    shares = rfa_shares(gram(rows, [1.0] * 8))
    weight = sum(shares)
    middle = sum(share * row.double() for share, row in zip(shares, rows, strict=True)) / weight
    assert isinstance(middle, torch.Tensor)
    assert min(shares[:6]) > 0.5 * WHOLE
    assert max(shares[6:]) < 0.01 * WHOLE
    assert float((middle - 1).abs().max()) < 1.5


@given(st.permutations(range(5)))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_opinions_do_not_depend_on_the_order_of_sites(order: list[int]) -> None:
    draw = torch.Generator().manual_seed(3)
    rows = {f"s{number}": torch.randn(128, generator=draw) for number in range(5)}
    weights = {site: 1.0 + number for number, site in enumerate(rows)}
    for rule in ("clip", "rfa"):
        found = examine(rows, weights, (0,), rule)
        mixed = examine({f"s{n}": rows[f"s{n}"] for n in order}, weights, (0,), rule)
        for site, each in found.items():
            other = mixed[site]
            assert abs((each.cosine or 0) - (other.cosine or 0)) <= 1
            assert abs((each.norm or 0) - (other.norm or 0)) <= 1
            assert abs(each.shares[0] - other.shares[0]) <= 1


def test_the_gate_tries_each_contribution_alone() -> None:
    layout = Layout.of({"x": (2,)})
    anchors = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([1.0])}
    gate = Gate(lambda model: float((model["x"] ** 2).sum() + model["y"].sum()))
    probe = gate.probe(anchors, layout)
    anchors["x"].zero_()  # training goes on: the gate has copies
    good, bad = torch.zeros(128), torch.zeros(128)
    good[:2], bad[:2] = torch.tensor([6.0, 8.0]), torch.tensor([-3.0, -4.0])
    found = {"good": RankOpinion(), "bad": RankOpinion(shares=[WHOLE // 2])}
    told = probe.opinions({"good": good, "bad": bad}, found, {"good": 2.0, "bad": 1.0})
    # Alone, half of it is sent: x = 0, loss 1 instead of 26.
    assert (told["good"].gain, told["good"].loss) == (25_000_000, 26_000_000)
    # Clipped to half: x = 1.5 times itself, loss 57.25.
    assert told["bad"].gain == -31_250_000


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    layout = Layout.of({"x": (1,)})
    gate = Gate(lambda model: 1.0 if float(model["x"]) == 0 else float("nan"))
    probe = gate.probe({"x": torch.zeros(1)}, layout)
    told = probe.opinions({"a": torch.ones(128)}, {"a": RankOpinion()}, {"a": 1.0})
    assert told["a"].gain == -(2**53)


def test_along_a_slope_is_what_a_trial_gains_where_the_loss_is_a_plane() -> None:
    layout = Layout.of({"x": (3,), "frozen": (2,), "y": (2,)})
    anchors = {
        "x": torch.tensor([3.0, 4.0, -1.0]),
        "frozen": torch.tensor([7.0, 7.0]),
        "y": torch.tensor([1.0, 2.0]),
    }
    gradients = {"x": torch.tensor([1.0, -2.0, 0.5]), "y": torch.tensor([0.25, -1.0])}

    def plane(model: Mapping[str, Tensor]) -> float:
        return 30.0 + sum(float(each @ model[name]) for name, each in gradients.items())

    draw = torch.Generator().manual_seed(4)
    sent = {site: torch.randn(layout.length, generator=draw) for site in "abc"}
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    found = {
        "a": RankOpinion(),
        "b": RankOpinion(shares=[WHOLE, 0, WHOLE // 4]),
        "c": RankOpinion(shares=[WHOLE // 2]),
    }
    tried = Gate(plane).probe(anchors, layout).opinions(sent, found, weights)
    along = GradientProbe(plane(anchors), gradients).probe(layout).opinions(sent, found, weights)
    for site in "abc":
        assert along[site].loss == tried[site].loss
        assert along[site].gain == pytest.approx(tried[site].gain, abs=20)
        assert along[site].shares == found[site].shares
    assert min(abs(each.gain or 0) for each in along.values()) > 1000


def test_a_slope_that_is_no_number_is_the_worst() -> None:
    layout = Layout.of({"x": (1,)})
    slope = GradientProbe(float("nan"), {"x": torch.tensor([float("nan")])})
    told = slope.probe(layout).opinions({"a": torch.ones(128)}, {"a": RankOpinion()}, {"a": 1.0})
    assert (told["a"].gain, told["a"].loss) == (-(2**53), 0)


def test_a_probe_is_made_again_of_a_checkpoint() -> None:
    """Though anchors have moved on since, but for those that have not."""
    layout = Layout.of({"x": (2,)})
    anchors = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([1.0]), "z": torch.tensor([5.0])}
    gate = Gate(lambda model: float(sum((each**2).sum() for each in model.values())))
    sent, found, weights = {"a": torch.ones(128)}, {"a": RankOpinion()}, {"a": 1.0}
    probe = gate.probe(anchors, layout)
    anchors["x"].mul_(2)
    anchors["z"].zero_()
    kept = probe.tensors(anchors)
    assert set(kept) == {"x", "z"}
    again = gate.again(kept, anchors, layout)
    assert again.opinions(sent, found, weights) == probe.opinions(sent, found, weights)
    assert gate.probe(anchors, layout).opinions(sent, found, weights) != again.opinions(
        sent, found, weights
    )
    slope = GradientProbe(0.1, {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([4.0])}).probe(
        layout
    )
    kept = slope.tensors(anchors)
    assert "y" not in kept, "no other fragment's"
    along = GradientProbe.again(kept, layout)
    assert along.opinions(sent, found, weights) == slope.opinions(sent, found, weights)
    assert along.opinions(sent, found, weights)["a"].gain == 3_000_000
