"""A shard's batches: the same rows as ever, read alone, in order, one step ahead."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dilocox.coordinator.protocol.round_plan import MemberPlan
from dilocox.data import SequenceSpace, TokenFiles, prepare
from dilocox.training.batches import Batches, Sequences, interval
from tests.data.conftest import section, write_corpus
from tests.data.flagged import write_flagged

pytestmark = pytest.mark.waits

LENGTH = 5


def sequences(start: int, count: int) -> Sequences:
    """Row n has the tokens 1000 n, 1000 n + 1, ..."""
    return (1000 * np.arange(start, start + count)[:, None] + np.arange(LENGTH + 1)).astype(
        np.int64
    )


class Hook:
    """A user's dataset that looks at who calls it, and when."""

    def __init__(self, bad: int = -1) -> None:
        self.calls: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.bad = bad

    def __call__(self, start: int, count: int) -> Sequences:
        self.calls.append((start, count))
        self.threads.add(threading.get_ident())
        if start <= self.bad < start + count:
            raise LookupError(f"sequence {self.bad}")
        return sequences(start, count)


def of_the_whole_site(
    ranges: list[tuple[int, int]], batch: int, number: int, shard: int, shards: int
) -> Sequences:
    """As it was before: every rank reads the site's batch and takes its rows."""
    rows = np.concatenate(
        [sequences(start, count) for start, count in interval(ranges, number * batch, batch)]
    )
    share = batch // shards
    return rows[shard * share : (shard + 1) * share]


RANGES = [(40, 3), (7, 10), (90, 1), (100, 10)]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_shard_gets_its_rows_of_the_sites_batch(shards: int) -> None:
    batch = 8
    for shard in range(shards):
        hook = Hook()
        batches = Batches(hook, shard, shards)
        for number in range(3):
            inputs, labels, _ = batches.step(RANGES, batch, number)
            wanted = torch.from_numpy(of_the_whole_site(RANGES, batch, number, shard, shards))
            assert torch.equal(inputs, wanted[:, :-1])
            assert torch.equal(labels, wanted[:, 1:])
            assert inputs.is_contiguous()
            assert labels.is_contiguous()
            assert inputs.dtype == labels.dtype == torch.int64
        # Only its own rows, each once, in order, and by one thread that is not the training's.
        share = batch // shards
        assert sum(count for _, count in hook.calls) == 3 * share
        own = [p for n in range(3) for p in interval(RANGES, n * batch + shard * share, share)]
        assert hook.calls == own
        assert len(hook.threads) == 1
        assert threading.get_ident() not in hook.threads


def test_the_next_step_is_read_while_one_is_computed_and_nothing_beyond_the_round() -> None:
    read = threading.Semaphore(0)
    seen: list[int] = []

    def dataset(start: int, count: int) -> Sequences:
        seen.append(start)
        read.release()
        return sequences(start, count)

    batches = Batches(dataset, 0, 1)
    for number, there in enumerate(([0, 4], [0, 4, 8], [0, 4, 8])):
        batches.step([(0, 14)], 4, number)
        while len(seen) < len(there):
            assert read.acquire(timeout=30)
        assert seen == there, "the last two sequences are no whole step"
    # The next round begins anew.
    inputs, _, _ = batches.step([(50, 4)], 4, 0)
    assert inputs[0, 0] == 50_000
    assert seen == [0, 4, 8, 50]


def test_an_error_comes_at_the_step_that_needs_the_sequence() -> None:
    batches = Batches(Hook(bad=9), 0, 1)
    batches.step([(0, 16)], 4, 0)
    batches.step([(0, 16)], 4, 1)
    with pytest.raises(LookupError, match="sequence 9"):
        batches.step([(0, 16)], 4, 2)
    # A round that does not need it goes on.
    assert batches.step([(20, 4)], 4, 0)[0][0, 0] == 20_000


def test_a_step_that_was_not_expected_is_read_as_asked() -> None:
    """An auditor may begin in the middle of a round, or a round with other ranges."""
    batches = Batches(Hook(), 0, 1)
    for number in (2, 0, 1, 1):
        inputs, _, _ = batches.step([(0, 16)], 4, number)
        assert inputs[:, 0].tolist() == [1000 * (4 * number + row) for row in range(4)]


def test_ranges_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter than the round needs"):
        Batches(Hook(), 0, 1).step([(0, 5)], 4, 1)


def test_batches_for_a_gpu_are_pinned_by_the_reader_on_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[tuple[str, int]] = []

    class Chosen:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            chosen.append((str(self.device), threading.get_ident()))

        def __exit__(self, *_: object) -> None:
            chosen.append(("left", threading.get_ident()))

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        chosen.append(("pinned", threading.get_ident()))
        return tensor

    monkeypatch.setattr(torch.cuda, "device", Chosen)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batches = Batches(sequences, 0, 1, torch.device("cuda", 3))
    inputs, _, _ = batches.step([(0, 4)], 4, 0)
    assert inputs[1, 2] == 1002
    assert [what for what, _ in chosen] == ["cuda:3", "pinned", "pinned", "left"]
    assert len({who for _, who in chosen}) == 1
    assert threading.get_ident() not in {who for _, who in chosen}


def test_training_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside: list[int] = []

        def dataset(start: int, count: int) -> Sequences:
            inside.append(torch.get_num_threads())
            return sequences(start, count)

        Batches(dataset, 0, 1).step([(0, 4)], 4, 0)
        assert inside == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def space_of(files: TokenFiles) -> SequenceSpace:
    return SequenceSpace(files, seed=0, sequence_length=8, packing="documents")


def member(start: int, batch: int, weight: float, space: str = "shared") -> MemberPlan:
    return MemberPlan(weight=weight, batch=batch, ranges=[(start, 4 * batch)], space=space)


@pytest.fixture
def flagged(tmp_path: Path) -> TokenFiles:
    """Documents of 2 to 9 tokens, of which some count."""
    corpus = write_corpus(tmp_path / "corpus", 4)
    text = prepare(section(corpus), tmp_path / "text", seed=0)
    draw = np.random.default_rng(0)
    documents = [
        (draw.integers(1, 200, n).tolist(), [0, *draw.integers(0, 2, n - 1).tolist()])
        for n in draw.integers(2, 10, 200)
    ]
    return write_flagged(tmp_path / "flagged", text, documents, documents)


@pytest.mark.parametrize("shards", [1, 2])
def test_every_shard_knows_the_counted_labels_of_the_sites_batch(
    flagged: TokenFiles, shards: int
) -> None:
    space = space_of(flagged)
    for number in range(3):
        parts = [
            Batches(space.read, shard, shards, space=space).step([(3, 12), (40, 9)], 6, number)
            for shard in range(shards)
        ]
        labels = torch.cat([part.labels for part in parts])
        for part in parts:
            assert part.counted is not None
            assert part.counted.positions is not None
            assert part.counted.positions.shape == part.inputs.shape
            assert part.counted.labels == part.counted.divisor == int((labels >= 0).sum())
    whole = [space.counted(3, 12), space.counted(40, 6), space.counted(3, 5)]
    batches = Batches(space.read, 0, shards, space=space)
    assert batches.labels([(3, 12), (40, 9)], 18) == whole[0] + whole[1]
    assert batches.labels([(3, 12), (40, 9)], 5) == whole[2]
    assert batches.labels([(3, 12)], 0) == 0
    assert Batches(space.read, 0, shards).labels([(3, 12)], 5) is None


def test_sites_that_average_gradients_count_as_one_batch(flagged: TokenFiles) -> None:
    """The weighted mean of sums / divisor is the sum of all sums / all counted labels."""
    space = space_of(flagged)
    members = [member(0, 2, 0.25), member(20, 6, 0.75)]
    value = torch.arange(300.0) ** 0.5
    for number in range(4):
        mean, total, count = 0.0, 0.0, 0
        for one in members:
            batch = Batches(space.read, 0, 1, space=space).step(
                one.ranges, one.batch, number, members
            )
            assert batch.counted is not None
            loss = float(value[batch.labels[batch.labels >= 0]].sum())
            mean += one.weight * loss / batch.counted.divisor
            total, count = total + loss, count + batch.counted.labels
            assert batch.counted.divisor != batch.counted.labels
            assert loss / batch.counted.divisor * batch.counted.stretch == pytest.approx(
                loss / batch.counted.labels
            )
        assert mean / sum(one.weight for one in members) == pytest.approx(total / count)
    # Of a site's own text others know nothing.
    private = [members[0], member(20, 6, 0.75, space="site/lyon")]
    alone = Batches(space.read, 0, 1, space=space).step(private[0].ranges, 2, 0, private)
    assert alone.counted is not None
    assert alone.counted.divisor == alone.counted.labels
