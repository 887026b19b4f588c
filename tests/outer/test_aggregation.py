"""Averages that withstand a few: by hand, exact, and the same in any order of the sites."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.coordinator.protocol.verdicts import WHOLE
from dilocox.errors import ExchangeError
from dilocox.outer.aggregation import aggregate
from dilocox.outer.averaging import average

pytestmark = pytest.mark.waits

HALF = WHOLE // 2


def column(*values: float) -> list[Tensor]:
    return [torch.tensor([value, -value]) for value in values]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("median", (1.0, 9.0, 2.0), 2.0),
        ("median", (1.0, 9.0, 2.0, 4.0), 3.0),
        ("median", (5.0,), 5.0),
        ("median", (5.0, 6.0), 5.5),
        ("trimmed", (1.0, 9.0, 2.0), 2.0),
        ("trimmed", (1.0, 100.0, 2.0, 3.0, -100.0), 2.0),
        ("trimmed", (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), 4.5),
        ("trimmed", (1.0, 3.0), 2.0),
        ("mean", (1.0, 3.0), 2.0),
    ],
)
def test_by_hand(rule: str, values: tuple[float, ...], expected: float) -> None:
    found = aggregate(rule, column(*values), [1.0] * len(values))
    assert found.tolist() == [expected, -expected]


def test_weights_are_taken_out_before_values_are_compared() -> None:
    # Pseudo-gradients 1, 2 and 3, of which the sites sent w times as much.
    sent = [torch.tensor([0.5]), torch.tensor([4.0]), torch.tensor([1.5])]
    assert float(aggregate("median", sent, [0.5, 2.0, 0.5])) == 2.0


def test_clip_takes_its_share_of_each_tensor() -> None:
    sent = [torch.full((256,), 8.0), torch.full((256,), 4.0)]
    shares = [[HALF, WHOLE], [WHOLE, 0]]
    found = aggregate("clip", sent, [1.0, 1.0], shares, offsets=(0, 128))
    assert found[:128].tolist() == [4.0] * 128
    assert found[128:].tolist() == [4.0] * 128


def test_rfa_counts_by_share_and_weight() -> None:
    sent = [torch.tensor([2.0]), torch.tensor([12.0])]
    found = aggregate("rfa", sent, [1.0, 2.0], [[WHOLE], [HALF]])
    assert float(found) == (2.0 + 6.0) / (1.0 + 1.0)
    # Nobody has a share: then all count alike.
    assert float(aggregate("rfa", column(2.0, 4.0), [1.0, 1.0], [[0], [0]])[0]) == 3.0


@pytest.mark.parametrize(
    ("rule", "shares", "offsets"),
    [("clip", [[WHOLE], [WHOLE]], (0, 1)), ("rfa", [[WHOLE, WHOLE], [WHOLE]], ()),
     ("rfa", [], ()), ("clip", [[WHOLE]], ()), ("clip", [[WHOLE]] * 3, ())],
)  # fmt: skip
def test_shares_that_do_not_fit_are_refused(
    rule: str, shares: list[list[int]], offsets: tuple[int, ...]
) -> None:
    with pytest.raises(ExchangeError, match="share"):
        aggregate(rule, column(1.0, 2.0), [1.0, 1.0], shares, offsets)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rules_by_value_know_no_order_of_sites(values: list[float]) -> None:
    rows = [torch.tensor([value, 0.0, -0.0]) for value in values]
    for rule in ("median", "trimmed"):
        found = aggregate(rule, [row.clone() for row in rows], [1.0] * len(rows))
        for order in itertools.islice(itertools.permutations(rows), 24):
            again = aggregate(rule, [row.clone() for row in order], [1.0] * len(rows))
            assert torch.equal(found.view(torch.int32), again.view(torch.int32))
        assert min(values) <= float(found[0]) <= max(values)


def test_with_whole_shares_it_is_the_mean_to_the_bit() -> None:
    draw = torch.Generator().manual_seed(1)
    sent = [torch.randn(256, generator=draw) for _ in range(3)]
    weights = [1.5, 0.75, 0.75]
    mean = average(sent, weights)
    copies = [each.clone() for each in sent]
    clip = aggregate("clip", copies, weights, [[WHOLE, WHOLE]] * 3, (0, 128))
    assert torch.equal(clip, mean)
    copies = [each.clone() for each in sent]
    assert torch.equal(aggregate("rfa", copies, weights, [[WHOLE]] * 3), mean)
