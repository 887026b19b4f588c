"""Row means of second moments, said and taken over."""

from __future__ import annotations

import torch

from dilocox.compression.moments import PERIOD, SecondMoments, due_rows
from dilocox.outer.fragments import Layout
from dilocox.outer.moments import row_means, shared_means, take_means

SHAPES = {"embedding": (70, 4), "norm": (8,), "experts": (2, 3, 5), "matrix": (40, 2)}
LAYOUT = Layout.of(SHAPES)


def moments(seed: int, without: tuple[str, ...] = ("matrix",)) -> dict[str, torch.Tensor]:
    """Second moments of a site; the matrix is another optimizer's."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=drawn) + 0.1
        for name, shape in SHAPES.items()
        if name not in without
    }


def grown(second: dict[str, torch.Tensor], weights: float = 1.0) -> SecondMoments:
    return SecondMoments(second, torch.tensor(weights), {})


def rows(second: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return second[name].reshape(-1, SHAPES[name][-1]).mean(1)


def test_after_a_period_all_rows_have_the_mean_of_the_sites_once() -> None:
    sites = [moments(seed) for seed in range(3)]
    before = [{name: tensor.clone() for name, tensor in each.items()} for each in sites]
    for round_ in range(100, 100 + PERIOD):
        said = [row_means(grown(each), LAYOUT, round_) for each in sites]
        assert {len(each) for each in said} == {due_rows(LAYOUT.geometry)}
        means = shared_means(said)
        for each in sites:
            take_means(grown(each), LAYOUT, round_, means)
    for name in ("embedding", "experts"):
        wanted = torch.stack([rows(each, name) for each in before]).mean(0)
        for each, own in zip(sites, before, strict=True):
            # A byte is 12.5 % off at most; what rows hold is scaled, not changed among itself.
            torch.testing.assert_close(rows(each, name), wanted, rtol=0.13, atol=0)
            ratio = each[name] / own[name]
            torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
        agreed = [rows(each, name) for each in sites]
        torch.testing.assert_close(agreed[0], agreed[1])
    for each, own in zip(sites, before, strict=True):
        assert torch.equal(each["norm"], own["norm"])


def test_a_round_touches_the_rows_that_are_due() -> None:
    second = moments(0)
    before = {name: tensor.clone() for name, tensor in second.items()}
    fours = torch.full((due_rows(LAYOUT.geometry),), 4.0)
    take_means(grown(second), LAYOUT, 5, fours)
    changed = (second["embedding"] != before["embedding"]).any(1).nonzero().flatten().tolist()
    assert changed == [5, 37, 69]
    changed = (second["experts"] != before["experts"]).reshape(6, 5).any(1).nonzero()
    assert changed.flatten().tolist() == [5]
    assert due_rows(LAYOUT.geometry) == 3 + 1 + 2


def test_shards_and_stages_have_the_rows_of_the_whole_tensor() -> None:
    """Row 37 of a tensor is due in the same rounds wherever it lies."""
    whole = moments(0)
    cut = {"embedding": whole["embedding"][27:].clone(), "other": torch.rand(9, 2)}
    shard = SecondMoments(cut, torch.tensor(1.0), {"embedding": 27})
    there = Layout.of({"other": (9, 2), "embedding": (43, 4)})
    for round_ in range(PERIOD):
        said = row_means(grown(whole), LAYOUT, round_)[:3]
        rows = range(round_, 70, PERIOD)
        expected = [int(code) for row, code in zip(rows, said, strict=False) if row >= 27]
        found = row_means(shard, there, round_)[1:]
        assert found[: len(expected)].tolist() == expected
        assert not found[len(expected) :].any()


def test_who_has_none_says_nothing_and_takes_nothing() -> None:
    newcomer = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    other = moments(1)
    own = {name: tensor.clone() for name, tensor in other.items()}
    said = [row_means(grown(each), LAYOUT, 3) for each in (newcomer, other)]
    assert not said[0].any()
    means = shared_means(said)
    for each in (newcomer, other):
        take_means(grown(each), LAYOUT, 3, means)
    assert not any(tensor.any() for tensor in newcomer.values())
    # The mean is over those that have one: the other's rows stay, but for what a byte is off.
    torch.testing.assert_close(rows(other, "embedding"), rows(own, "embedding"), rtol=0.13, atol=0)
    alone = shared_means([said[0], said[0]])
    take_means(grown(other), LAYOUT, 3, alone)
    assert not alone.any()


def test_a_newcomers_moments_are_compared_as_adamw_uses_them() -> None:
    full = moments(0)
    # After one step of beta2 = .95 a site that saw the same gradients all along has a twentieth.
    young = {name: tensor * 0.05 for name, tensor in full.items()}
    sites = [grown(full), grown(young, 0.05)]
    said = [row_means(each, LAYOUT, 0) for each in sites]
    assert (said[0].int() - said[1].int()).abs().max() <= 1  # a rounding may cross an edge
    means = shared_means(said)
    for each in sites:
        take_means(each, LAYOUT, 0, means)
    torch.testing.assert_close(young["embedding"] * 20, full["embedding"])


def test_before_the_first_step_nothing_is_said() -> None:
    none = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    assert not row_means(grown(none, 0.0), LAYOUT, 0).any()
