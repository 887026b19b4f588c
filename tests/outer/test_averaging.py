"""Averages, chunks, and the outer optimizer."""

from __future__ import annotations

import hashlib
import math
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilocox.compression import BLOCK, Geometry, Part, compressor
from dilocox.coordinator.protocol.messages import ExchangeKey
from dilocox.coordinator.protocol.verdicts import WHOLE
from dilocox.errors import ExchangeError
from dilocox.outer.averaging import average, chunk_bounds, requantise
from dilocox.outer.contribution import Contribution
from dilocox.outer.contribution_set import Weighing
from dilocox.outer.outer_step import nesterov_step
from tests.support.patterns import patterns

pytestmark = pytest.mark.waits


def parts(count: int, n: int = 256, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) for _ in range(count)]


@given(weights=st.lists(st.floats(0.01, 9.0), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_average_is_the_weighted_mean(weights: list[float], seed: int) -> None:
    plain = parts(len(weights), seed=seed)
    sent = [part * weight for part, weight in zip(plain, weights, strict=True)]
    before = [each.clone() for each in sent]
    found = average(iter(sent), weights)
    expected = sum(p.double() * w for p, w in zip(plain, weights, strict=True)) / sum(weights)
    assert isinstance(expected, Tensor)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(sent, before, strict=True))


def test_average_adds_in_the_listed_order() -> None:
    large, small = torch.full((1,), 2.0**24), torch.ones(1)
    assert average([large, small, small], [1.0, 0.0, 0.0]).item() == 2.0**24
    assert average([small, small, large], [1.0, 0.0, 0.0]).item() == 2.0**24 + 2


def test_average_divides_and_does_not_multiply_by_a_reciprocal() -> None:
    values = torch.arange(1, 4097, dtype=torch.float32)
    found = average([values], [3.0])
    assert torch.equal(found, (values.double() / 3).float())
    assert not torch.equal(found, values * torch.tensor(1 / 3))


class Decoding:
    """Decodes payloads, and counts earlier contributions that are in memory beside the next."""

    def __init__(self) -> None:
        self.made, self.beside = list[weakref.ref[Tensor]](), 0

    def __call__(self, payload: Tensor) -> Tensor:
        self.beside = max(self.beside, sum(each() is not None for each in self.made))
        values = payload.clone()
        self.made.append(weakref.ref(values))
        return values


@pytest.mark.parametrize("rule", ["mean", "clip", "rfa"])
def test_only_the_own_contribution_is_kept_while_the_next_is_decoded(rule: str) -> None:
    geometry = Geometry(((256,),), (0,), 256)
    weights = {"a": 1.5, "b": 0.5, "c": 1.0, "d": 2.0, "e": 1.0}
    sent = dict(zip(weights, parts(5), strict=True))
    sent["b"][7] = math.nan
    sent["d"].zero_()
    what = Contribution(
        ExchangeKey.outer(3, 0, 1), 256, None, compressor("none", geometry), "gather", weights,
        aggregation=rule,
    )  # fmt: skip
    decode = Decoding()
    weighing = Weighing(what, "a", list(weights), decode)
    opinions = weighing.examined(sent)
    assert {site: each.code for site, each in opinions.items()} == {"b": "not-finite", "d": "zero"}
    assert decode.beside == 1
    found = weighing.settled(["a", "c", "e"], {})
    assert found is not None
    assert torch.equal(found, average([sent["a"], sent["c"], sent["e"]], [1.5, 1.0, 1.0]))
    # Of another set, the contributions are decoded again.
    shares = {site: [WHOLE] for site in weights}
    again = weighing.settled(["c", "e", "a"], shares)
    assert again is not None
    assert torch.equal(again, average([sent["c"], sent["e"], sent["a"]], [1.0, 1.0, 1.5]))
    assert len(decode.made) == 8
    assert decode.beside == 1


def test_senseless_averages_are_refused() -> None:
    for decoded, weights in (
        ([], []),
        (parts(2), [1.0]),
        (parts(1), [0.0]),
        (parts(1), [math.nan]),
    ):
        with pytest.raises(ExchangeError, match="cannot average"):
            average(decoded, weights)


@given(blocks=st.integers(0, 50), owners=st.integers(1, 9))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_chunks_cover_everything_evenly(blocks: int, owners: int) -> None:
    bounds = chunk_bounds(blocks * BLOCK, owners)
    assert len(bounds) == owners
    assert bounds[0][0] == 0
    assert bounds[-1][1] == blocks * BLOCK
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    sizes = [end - start for start, end in bounds]
    assert all(size % BLOCK == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= BLOCK


def test_chunks_of_broken_blocks_are_refused() -> None:
    with pytest.raises(ExchangeError, match="cannot divide 100 values"):
        chunk_bounds(100, 2)
    with pytest.raises(ExchangeError, match="among 0 owners"):
        chunk_bounds(128, 0)


def part_of(name: str, n: int) -> Part:
    """The whole of a fragment that is one vector."""
    found = compressor(name, Geometry(((n,),), (0,), n))
    return found.part(0, n, 0)


def test_requantise_accounts_for_what_it_withholds() -> None:
    mean = parts(1)[0]
    part = part_of("int4", mean.numel())
    again = requantise(part, mean, 2.5)
    assert torch.equal(again.decoded, part.decode(again.payload))
    assert torch.allclose(again.decoded + again.second_error / 2.5, mean, atol=1e-6)
    assert again.second_error.abs().max() > 0.01
    assert not requantise(part_of("none", mean.numel()), mean, 2.5).second_error.any()


def test_outer_step_is_sgd_with_nesterov() -> None:
    anchor = parts(1, seed=1)[0]
    reference = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    momentum = torch.zeros_like(anchor)
    for delta in parts(5, seed=2):
        kept = delta.clone()
        nesterov_step(anchor, momentum, delta, 0.7, 0.9)
        assert torch.equal(delta, kept)
        reference.grad = delta.clone()
        optimizer.step()
    assert torch.allclose(anchor, reference.detach(), rtol=0, atol=1e-5)


def test_outer_step_rounds_every_operation() -> None:
    """Each product and sum in fp32 on its own, done here one value at a time in float64."""

    def fp32(value: float) -> float:
        return torch.tensor(value, dtype=torch.float32).item()

    anchor, momentum, delta = (part[:40].clone() for part in parts(3, seed=3))
    rate, factor = fp32(0.7), fp32(0.9)
    expected = []
    for a, m, d in zip(anchor.tolist(), momentum.tolist(), delta.tolist(), strict=True):
        new = fp32(fp32(m * factor) + d)
        step = fp32(fp32(fp32(new * factor) + d) * rate)
        expected.append((fp32(a - step), new))
    nesterov_step(anchor, momentum, delta, 0.7, 0.9)
    assert list(zip(anchor.tolist(), momentum.tolist(), strict=True)) == expected


def test_golden_outer_step() -> None:
    """The bits of averages and steps are the same in every release and on every machine."""
    n = 1 << 16
    values = patterns(3 * n).view(3, n)
    anchor, momentum = values[0].clone(), torch.zeros(n)
    for _ in range(2):
        nesterov_step(anchor, momentum, average([values[1], values[2]], [0.75, 1.3]), 0.8, 0.5)
    digest = hashlib.sha256(anchor.numpy().data)
    digest.update(momentum.numpy().data)
    assert digest.hexdigest() == "36cf823d940f77cb80c0c1293b2927a5c7e1fc822e6df344895c58694d9bde17"
