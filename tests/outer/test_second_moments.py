"""Row means of second moments, said and taken over."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from dilocox.compression import Compressor
from dilocox.compression.second_moments import PERIOD, SecondMoments, due_rows, from_bytes
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout
from dilocox.outer.loop import LoopPlace, OuterLoop
from dilocox.outer.second_moments import row_means, take_means, told_by
from tests.outer.test_loop import plan

pytestmark = pytest.mark.waits

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


def exchange(sites: list[SecondMoments], round_: int, layout: Layout = LAYOUT) -> None:
    """All say what they have, then all take over what the others have said."""
    said = [row_means(each, layout, round_) for each in sites]
    for number, each in enumerate(sites):
        take_means(each, layout, round_, told_by(said[:number] + said[number + 1 :]))


def test_after_a_period_all_rows_have_the_mean_of_the_sites_once() -> None:
    sites = [moments(seed) for seed in range(3)]
    before = [{name: tensor.clone() for name, tensor in each.items()} for each in sites]
    for round_ in range(100, 100 + PERIOD):
        exchange([grown(each) for each in sites], round_)
    for name in ("embedding", "experts"):
        wanted = torch.stack([rows(each, name) for each in before]).mean(0)
        for each, own in zip(sites, before, strict=True):
            # A byte is 12.5 % off at most; what rows hold is scaled, not changed among itself.
            torch.testing.assert_close(rows(each, name), wanted, rtol=0.13, atol=0)
            ratio = each[name] / own[name]
            torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    for each, own in zip(sites, before, strict=True):
        assert torch.equal(each["norm"], own["norm"])


def test_a_round_touches_the_rows_that_are_due() -> None:
    second = moments(0)
    before = {name: tensor.clone() for name, tensor in second.items()}
    due = due_rows(LAYOUT.geometry)
    take_means(grown(second), LAYOUT, 5, (torch.full((due,), 4.0), torch.ones(due)))
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


def test_who_has_none_gets_the_others() -> None:
    unseen = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    other = moments(1)
    own = {name: tensor.clone() for name, tensor in other.items()}
    said = [row_means(grown(each), LAYOUT, 3) for each in (unseen, other)]
    assert not said[0].any()
    exchange([grown(unseen), grown(other)], 3)
    # Who alone has one keeps it, to the bit.
    assert all(torch.equal(other[name], own[name]) for name in own)
    due = unseen["embedding"][3::PERIOD]
    torch.testing.assert_close(due, due[:, :1].expand_as(due))
    torch.testing.assert_close(due[:, 0], rows(other, "embedding")[3::PERIOD], rtol=0.13, atol=0)
    assert not unseen["matrix"].any()


def test_before_the_first_step_nothing_is_said_or_taken() -> None:
    none = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    assert not row_means(grown(none, 0.0), LAYOUT, 0).any()
    exchange([grown(none, 0.0), grown(moments(0))], 0)
    assert not any(tensor.any() for tensor in none.values())


def test_a_newcomers_moments_are_compared_as_adamw_uses_them() -> None:
    full = moments(0)
    # After one step of beta2 = .95 a site that saw the same gradients all along has a twentieth.
    young = {name: tensor * 0.05 for name, tensor in full.items()}
    sites = [grown(full), grown(young, 0.05)]
    said = [row_means(each, LAYOUT, 0) for each in sites]
    assert (said[0].int() - said[1].int()).abs().max() <= 1  # a rounding may cross an edge
    exchange(sites, 0)
    torch.testing.assert_close(young["embedding"] * 20, full["embedding"], rtol=0.13, atol=0)


def test_a_gradient_that_came_back_on_the_way_is_not_forgotten() -> None:
    """An embedding's row of a token that had not been seen for long, and is in the last batches."""
    sites = [{"embedding": torch.full((70, 4), 1e-14)} for _ in range(2)]
    layout = Layout.of({"embedding": (70, 4)})
    said = [row_means(grown(each), layout, 0) for each in sites]
    sites[0]["embedding"][0] = 1e-6
    take_means(grown(sites[0]), layout, 0, told_by(said[1:]))
    torch.testing.assert_close(sites[0]["embedding"][0], torch.full((4,), 0.5e-6))


@pytest.mark.parametrize("byte", [0, 1, 255])
@pytest.mark.parametrize("own", [0.0, 1.4e-45, 3e-39, 1e-18, 1e-6, 1e30])
def test_whatever_is_said_moments_stay_finite(byte: int, own: float) -> None:
    row = torch.tensor([own, 0.0, own, own / 7])
    second = {"embedding": row.repeat(70, 1)}
    layout = Layout.of({"embedding": (70, 4)})
    said = torch.full((due_rows(layout.geometry),), byte, dtype=torch.uint8)
    take_means(grown(second), layout, 0, told_by([said]))
    assert second["embedding"].isfinite().all()
    mean, before = float(second["embedding"][0].mean()), float(row.mean())
    told = float(from_bytes(torch.tensor([byte], dtype=torch.uint8)))
    if byte == 0:
        assert mean == before
    elif before < 2.0**-60:
        assert mean == told
    else:
        assert mean == pytest.approx((before + told) / 2, rel=1e-5)


class Pair:
    """Two sites of one fragment, whose exchanges are over once both have handed in."""

    def __init__(self) -> None:
        self.second = {
            site: {"a": torch.full((70, 4), scale)}
            for site, scale in (("lyon", 1e-6), ("paris", 9e-6))
        }
        self.counted = ("lyon", "paris")
        self._open: dict[str, tuple[Contribution, Future[Outcome]]] = {}
        self.loops = {site: self._loop(site) for site in self.second}

    def _loop(self, site: str) -> OuterLoop:
        live = {"a": torch.zeros(70, 4)}
        states = [FragmentState(Layout.of({"a": (70, 4)}), live, error_feedback=True)]
        second = grown(self.second[site])
        return OuterLoop(
            states, live, LoopPlace(site), lambda given: self._submit(site, given), lambda: None,
            second=lambda: second,
        )  # fmt: skip

    def _submit(self, site: str, given: Contribution) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._open[site] = (given, future)
        if len(self._open) == len(self.second):
            payloads = {}
            for name, (each, _) in self._open.items():
                assert isinstance(each.compressor, Compressor)
                assert each.values is not None
                part = each.compressor.part(0, each.length, each.seed)
                payloads[name] = part.encode(each.values)
            told = tuple(payloads[name] for name in self.counted)
            for name, (each, open_) in self._open.items():
                sent = each.values if name in self.counted else None
                mean = torch.zeros(each.length)
                open_.set_result(Outcome(mean, self.counted, sent, None, 0, 0.0, 1, payloads=told))
            self._open.clear()
        return future

    def round(self, number: int, codec: str = "int4+moments") -> None:
        made = plan(
            number, codec=codec, slots=2, fragments=1, delay=1, inner_steps=2, first_tick=2 * number
        )
        for slot in (1, 2):
            for loop in self.loops.values():
                loop.land_before(made, slot)
            for loop in self.loops.values():
                loop.end_of_slot(made, slot)

    def means(self, site: str) -> torch.Tensor:
        return self.second[site]["a"].mean(1)


def test_landings_bring_the_sites_together() -> None:
    pair = Pair()
    for round_ in range(PERIOD + 1):
        pair.round(round_)
    for site in pair.second:
        torch.testing.assert_close(pair.means(site), torch.full((70,), 5e-6), rtol=0.13, atol=0)


def test_a_site_that_is_left_out_takes_over_and_is_not_asked() -> None:
    pair = Pair()
    pair.counted = ("lyon",)
    for round_ in range(PERIOD + 1):
        pair.round(round_)
    assert torch.equal(pair.means("lyon"), torch.full((70,), 1e-6))
    torch.testing.assert_close(pair.means("paris"), torch.full((70,), 5e-6), rtol=0.13, atol=0)


def test_rounds_without_moments_change_none() -> None:
    pair = Pair()
    for round_ in range(3):
        pair.round(round_, codec="int4")
    assert torch.equal(pair.means("paris"), torch.full((70,), 9e-6))
