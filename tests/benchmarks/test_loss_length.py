"""The simulation of runs of different length: what it trains, and which rows come next."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from benchmarks.common import Row
from benchmarks.loss_length import command as loss_length
from benchmarks.loss_length import mixed
from benchmarks.loss_length.command import Job, best, jobs
from benchmarks.loss_length.model import LAYOUT, SITES, Text, first_weights, losses, views
from benchmarks.loss_length.run import Inner, Outer, Outside, Plan, reduction, train
from benchmarks.quality import data as quality_data


def row(plan: Plan, steps: int, rate: float, loss: float | None, iid: bool = False) -> Row:
    return {
        "plan": plan.name, "steps": steps, "rate": rate, "seed": 0, "iid": iid, "loss": loss,
        "reduction": reduction(plan), **asdict(Outside.of_table(plan, steps)),
    }  # fmt: skip


def job(plan: Plan, steps: int, rate: float) -> Job:
    return Job(plan, steps, rate, 0, Outside.of_table(plan, steps))


SPARSE, SYNCHRONOUS = Plan(2, "topk:17"), Plan(0, "")


def test_longer_runs_go_by_the_best_rate_of_shorter_ones() -> None:
    lengths = (640, 3300)
    first = jobs([], [SPARSE], lengths, 0)
    assert first == [job(SPARSE, 640, rate) for rate in loss_length.RATES]
    rows = [row(SPARSE, 640, rate, 3.0 - 100 * rate) for rate in loss_length.RATES[:-1]]
    assert jobs(rows, [SPARSE], lengths, 0) == first[-1:]
    rows.append(row(SPARSE, 640, loss_length.RATES[-1], None))  # diverged
    rate = loss_length.RATES[-2]
    assert jobs(rows, [SPARSE], lengths, 0) == [
        job(SPARSE, 3300, rate), job(SPARSE, 3300, rate / 2)
    ]  # fmt: skip
    assert jobs(rows, [SPARSE], (3300,), 0, [0.1]) == [job(SPARSE, 3300, 0.1)]
    # Other rates outside are other rows.
    rate = loss_length.RATES[0]
    (other,) = jobs(rows, [SPARSE], (640,), 0, [rate], {"beta": 0.5})
    usual = job(SPARSE, 640, rate)
    assert other == replace(usual, outside=replace(usual.outside, beta=0.5))
    assert jobs(rows, [SPARSE], (640,), 0, [rate], {"beta": usual.outside.beta}) == []
    # Synchronous training has none.
    assert jobs([], [SYNCHRONOUS], (640,), 0, [rate], {"beta": 0.5}) == [
        job(SYNCHRONOUS, 640, rate)
    ]


def test_the_best_rate_counts_on_both_sides() -> None:
    rows = [row(SYNCHRONOUS, 640, 1e-3, 2.5), row(SYNCHRONOUS, 640, 2e-3, 2.0)]
    rows += [row(SPARSE, 640, 1e-3, 2.2), row(SPARSE, 640, 2e-3, None)]
    found = {each["plan"]: each for each in best(rows)}
    assert found["synchronous"]["loss"] == 2.0
    assert found["H=2 topk:17"]["gap"] == pytest.approx(0.1)


def test_the_same_text_at_all_sites_is_compared_with_itself() -> None:
    rows = [row(SYNCHRONOUS, 640, 1e-3, 2.0), row(SYNCHRONOUS, 640, 1e-3, 2.2, iid=True)]
    rows += [row(SPARSE, 640, 1e-3, 2.2, iid=True)]
    found = {(each["plan"], each["iid"]): each["gap"] for each in best(rows)}
    assert found == {
        ("synchronous", False): 0.0,
        ("synchronous", True): 0.0,
        (SPARSE.name, True): 0,
    }
    # A run of it is not made again, the same with a text of each site's own is.
    assert jobs(rows, [SPARSE], (640,), 0, [1e-3], iid=True) == []
    assert jobs(rows, [SPARSE], (640,), 0, [1e-3]) == [job(SPARSE, 640, 1e-3)]


def test_sites_of_the_same_text_draw_different_sequences_of_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = [chr(ord("a") + number % 26) * 60 for number in range(4 * 50)]
    monkeypatch.setattr(quality_data, "read_corpus", lambda _wikitext: documents)
    own, same = Text.read(), Text.read(iid=True)
    assert torch.equal(own.held_out, same.held_out)
    assert [len(part) for part in same.parts] == [sum(map(len, own.parts))] * SITES
    batch = same.batch(torch.Generator().manual_seed(0))
    assert len(batch.flatten(0, 1).unique(dim=0)) > SITES


def test_reductions_by_hand() -> None:
    # Three payloads of 4 bytes a value every 20 steps, over 1.5 gradients after each step.
    assert reduction(Plan(20, "none")) == pytest.approx(20 / 2)
    assert reduction(Plan(10, "int4")) == pytest.approx(10 / 2 * 32 / 4.125)
    assert reduction(SYNCHRONOUS) == 1.0


def test_copies_do_not_see_each_other() -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (2, 3, 49), generator=draw)
    flat = torch.stack([first_weights(0), first_weights(1)])
    both = losses(flat, ids)
    for copy in range(2):
        (alone,) = losses(flat[copy : copy + 1], ids[copy : copy + 1])
        assert float(alone) == pytest.approx(float(both[copy]), rel=1e-5)
    assert views(flat)["embedding"].shape == (2, 257, 48)


def test_a_round_by_hand() -> None:
    # Dense rounds of 4 steps that land one step later: gamma .8, mu .5 from five steps on.
    steps, plan = 20, Plan(20, "none")
    outside = Outside.of_table(plan, steps)
    assert (outside.beta, outside.view) == (1.0, 0.0)
    start = first_weights(0)
    live = start.repeat(SITES, 1)
    outer = Outer(live, plan, steps, outside)
    inner = Inner(SITES, 1e-3, steps)
    moved = torch.zeros_like(live)
    moved[0, 5], moved[1, 5], moved[2, 7] = 4.0, 2.0, -8.0
    live.sub_(moved)
    outer.after(steps, live, inner)
    wanted = start - outside.gamma * (1 + outside.mu) * moved.mean(0)
    assert torch.allclose(outer.anchor, wanted, atol=1e-6)
    assert torch.allclose(live, wanted.expand_as(live), atol=1e-6)


def test_what_top_k_withholds_comes_later() -> None:
    plan = Plan(1, "topk:5")
    live = first_weights(0).repeat(SITES, 1)
    outer = Outer(live, plan, 1000, Outside.of_table(plan, 1000))
    inner = Inner(SITES, 1e-3, 1000)
    draw = torch.Generator().manual_seed(1)
    change = torch.randn(LAYOUT.length, generator=draw)
    live.sub_(1e-3 * change)
    outer.after(1, live, inner)
    withheld = outer._residual[0].clone()
    all_of_it = 1e-3 * float(change.norm())
    assert 0.9 * all_of_it < float(withheld.norm()) < all_of_it
    outer.after(2, live, inner)
    assert float(outer._residual[0].norm()) < float(withheld.norm())


def test_a_short_run_learns_and_is_the_same_again() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, 4, (500,), generator=draw).to(torch.uint8) for _ in range(SITES)]
    held_out = torch.randint(0, 4, (2 * SITES, 49), generator=draw)
    text = Text(parts, held_out)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [
            train(text, plan, 1.2e-2, 12, 0, Outside.of_table(plan, 12))
            for plan in (SPARSE, SPARSE, SYNCHRONOUS)
        ]
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    assert max(found) < 5.3  # 5.5 before


def test_factored_moments_are_equal_and_keep_the_means_of_rows_and_columns() -> None:
    inner = Inner(SITES, 1e-3, 10)
    draw = torch.Generator().manual_seed(0)
    inner.second.copy_(torch.rand(inner.second.shape, generator=draw))
    before = {name: view.mean(0) for name, view in views(inner.second.clone()).items()}
    inner.factor_moments()
    for name, after in views(inner.second).items():
        if after.dim() > 2:
            assert torch.equal(after, after[:1].expand_as(after))
            for dim in (-1, -2):
                means = before[name].mean(dim)
                assert torch.allclose(after[0].mean(dim), means, rtol=1e-5)
            assert torch.linalg.matrix_rank(after[0]) == 1
        else:
            assert not torch.equal(after[0], after[1])  # vectors are a site's own


def test_held_out_blocks_are_not_trained_on(tmp_path: Path) -> None:
    content = b"".join(bytes([number % 251]) * mixed.BLOCK for number in range(60))
    train_on, held = mixed.divided(content)
    assert len(train_on) + len(held) == len(content)
    assert [held[at] for at in range(0, len(held), mixed.BLOCK)] == [0, 25, 50]
    assert not set(held) & set(train_on)
    files = []
    for name in "abcd":
        files.append(tmp_path / name)
        files[-1].write_bytes(name.encode() + content)
    own, same = (mixed.read(tuple(files), iid) for iid in (False, True))
    assert [chr(int(part[0])) for part in own.parts] == ["\0"] * 4  # the first block is held out
    assert [len(part) for part in same.parts] == [sum(len(part) for part in own.parts)] * 4
    assert torch.equal(own.held_out, same.held_out)


def test_a_gap_is_to_the_best_synchronous_row() -> None:
    sparse = {"plan": "H=2 topk:7", "moments": "rows", "iid": False, "reduction": 500.0}
    base = {"plan": mixed.SYNCHRONOUS, "moments": "none", "iid": False, "reduction": 1.0}
    rows = [
        {**base, "rate": 1e-3, "loss": 2.0}, {**base, "rate": 2e-3, "loss": 2.5},
        {**sparse, "rate": 1e-3, "loss": 2.2}, {**sparse, "rate": 2e-3, "loss": 2.4},
    ]  # fmt: skip
    text = mixed.report(rows)
    assert "+10.0%" in text
    assert "2.4" not in text
