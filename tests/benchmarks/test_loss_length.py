"""The simulation of runs of different length: what it trains, and which rows come next."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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


def test_a_longer_run_goes_by_runs_of_the_same_outer_values() -> None:
    """A rate that suits a beta that somebody tried says nothing of the table's."""
    lengths = (640, 3300)
    rows = [row(SPARSE, 640, rate, 3.0 - 100 * rate) for rate in loss_length.RATES]
    lucky = {**row(SPARSE, 640, loss_length.RATES[0], 1.0), "beta": 0.5}
    best_rate = loss_length.RATES[-1]
    assert [each.rate for each in jobs([*rows, lucky], [SPARSE], lengths, 0)] == [
        best_rate, best_rate / 2
    ]  # fmt: skip
    tried = jobs([*rows, lucky], [SPARSE], lengths, 0, outside={"beta": 0.5})
    assert [(each.steps, each.rate) for each in tried] == [
        (640, rate) for rate in loss_length.RATES[1:]
    ]


def test_the_table_does_not_take_the_best_of_all_outer_values_that_were_tried() -> None:
    """A plan with 17 trials by hand would look better than a plan with one."""
    rows = [row(SYNCHRONOUS, 640, 1e-3, 2.0), row(SPARSE, 640, 1e-3, 2.2)]
    rows += [{**row(SPARSE, 640, 1e-3, 2.1), "mu": 0.7}, {**row(SPARSE, 640, 2e-3, 2.4), "mu": 0.7}]
    found = {each["mu"]: each["gap"] for each in best(rows) if each["plan"] == SPARSE.name}
    assert found == pytest.approx({0.5: 0.1, 0.7: 0.05})
    assert len(loss_length.report(rows).splitlines()) == 1 + 3
    assert "0.7" in loss_length.report(rows)


def test_a_run_that_diverged_has_no_gap() -> None:
    rows = [row(SYNCHRONOUS, 640, 1e-3, 2.0), row(SPARSE, 640, 1e-3, None)]
    assert "inf" not in loss_length.report(rows)
    rows = [row(SYNCHRONOUS, 640, 1e-3, None), row(SPARSE, 640, 1e-3, 2.0)]
    assert "-100" not in loss_length.report(rows)
    mixture = [{**each, "moments": "none"} for each in rows]
    assert "-100" not in mixed.report(mixture)
    assert "inf" not in mixed.report([{**mixture[0], "loss": 2.0}, {**mixture[1], "loss": None}])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the benchmark with a stand-in for its runs; `made` has their jobs."""

    def main(made: list[Job], *words: str) -> int:
        def rows_of(_make: object, wanted: Sequence[Job], _workers: int) -> Iterator[Row]:
            for each in wanted:
                made.append(each)
                yield {
                    **row(each.plan, each.steps, each.rate, 2.0), "seed": each.seed,
                    **asdict(each.outside), "text": loss_length.text_digest(each.iid),
                    "seconds": 1.0,
                }  # fmt: skip

        monkeypatch.setattr(loss_length, "made", rows_of)
        monkeypatch.setattr(loss_length.common, "machine", lambda: {"cores": 1})
        monkeypatch.setattr(loss_length.common, "end_on_signals", lambda: None)
        monkeypatch.setattr(loss_length, "_text", lambda _iid: Text([torch.zeros(1)], TEXT[0]))
        monkeypatch.setattr(sys, "argv", ["loss_length", *words])
        return loss_length.main()

    return main


TEXT = {0: torch.zeros(1)}


def test_a_file_of_other_results_is_refused_and_a_text_of_another_python(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    file.write_text('{"benchmark": "quality", "rows": [{"label": "x"}]}')
    words = ("--json", str(file), "--plans", "2:topk:17", "--steps", "640", "--rates", "3e-3")
    with pytest.raises(SystemExit, match="no results of loss_length"):
        call([], *words)
    file.unlink()
    made = list[Job]()
    assert call(made, *words) == 0
    assert call(made, *words) == 0
    assert len(made) == 1
    monkeypatch.setitem(TEXT, 0, torch.ones(1))
    with pytest.raises(SystemExit, match="of another text"):
        call(made, *words, "--seed", "1")
    # Committed rows name no text, and are gone on with.
    committed = Path(shutil.copy(loss_length.RESULTS, tmp_path / "committed.json"))
    again = list[Job]()
    assert call(again, "--json", str(committed), *words[2:-1], "1e-4") == 0
    assert len(again) == 1


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (("--plans", "2"), "2: write H:CODEC, such as 2:topk:17"),
        (("--plans", "x:none"), "x:none: write H:CODEC"),
        (("--plans", "2:topq:1"), "2:topq:1: "),
        (("--steps", "0"), "0: give a whole number of 1 or more"),
        (("--quick", "--steps", "3300"), "--quick: makes the shortest length; leave out --steps"),
    ],
)
def test_plans_and_lengths_that_cannot_be_read_are_refused(
    call: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], mend: str
) -> None:
    with pytest.raises(SystemExit) as end:
        call([], *words)
    assert end.value.code == 2
    assert mend in capsys.readouterr().err


def test_lengths_are_made_from_the_shortest_on(call: Any, tmp_path: Path) -> None:
    made = list[Job]()
    words = ("--json", str(tmp_path / "rows.json"), "--plans", "2:topk:17", "--steps", "20", "10")
    assert call(made, *words) == 0
    assert [each.steps for each in made] == [10] * 4 + [20] * 2


SLOW = """
import sys, time
sys.path.insert(0, {root!r})
from benchmarks import common
from benchmarks.loss_length.command import made

def slow(number):
    print("begun", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    common.end_on_signals()
    list(made(slow, [0, 1, 2], 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_the_benchmark_waits_for_no_row_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(root=str(Path(__file__).parents[2])))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(number)
            # The pipe ends with the last process that can write to it. A row takes 60 s.
            assert process.communicate(timeout=20)[0] == ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]


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


def test_rows_of_mixed_text_are_of_the_outer_values_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = mixed.Job(SPARSE, "rows", 1e-3, iid=False)
    usual = Outside.of_table(SPARSE, mixed.STEPS)
    monkeypatch.setattr(mixed, "read", lambda *_: None)
    monkeypatch.setattr(mixed, "train", lambda *_: 2.0)
    made = mixed.make((), job)
    assert mixed.is_of(made, job)
    assert not mixed.is_of({**made, "rate": 2e-3}, job)
    # The controller's table has changed since.
    assert not mixed.is_of({**made, "gamma": usual.gamma / 2}, job)
    # Rows of earlier versions do not name them.
    assert mixed.is_of({key: made[key] for key in made if not hasattr(usual, key)}, job)


def test_the_table_of_mixed_text_does_not_take_the_best_of_several_outer_values() -> None:
    base = {"plan": mixed.SYNCHRONOUS, "moments": "none", "iid": False, "rate": 1e-3}
    sparse = {**base, "plan": SPARSE.name, "moments": "rows", "reduction": 500.0}
    rows = [{**base, "loss": 2.0}, {**sparse, "loss": 2.2, "gamma": 1.9, "mu": 0.5}]
    rows += [{**sparse, "loss": 2.1, "gamma": 1.2, "mu": 0.5}]
    text = mixed.report(rows)
    assert "+10.0%" in text
    assert "+5.0%" in text


def test_a_plan_of_no_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in "abcd"]
    monkeypatch.setattr(sys, "argv", ["mixed", "--domains", *files, "--plans", "H=2 topk:8"])
    with pytest.raises(SystemExit):
        mixed.main()
    assert "--plans 'H=2 topk:8': there are" in capsys.readouterr().err


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
