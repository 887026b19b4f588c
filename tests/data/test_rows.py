"""Rows: every counted token is a label once, documents stay whole, and reading is pure."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.data import LongDocuments, Packing, RowRules
from dilocox.data import SequenceSpace, TokenFiles, held_out, prepare, show
from dilocox.data.coverage import seen_documents
from dilocox.data.rows import NOT_COUNTED, DocumentRows, RowBatch, StreamRows, plan_rows
from dilocox.data.sequences import check_lengths
from dilocox.errors import DataError
from tests.data.conftest import section
from tests.data.flagged import Document, write_flagged

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)
HELD: list[Document] = [([5, 6, 7], [0, 1, 1])]
DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 1)), min_size=1, max_size=11),
    min_size=1,
    max_size=12,
)


def spread(documents: list[list[tuple[int, int]]]) -> list[Document]:
    return [([token for token, _ in each], [count for _, count in each]) for each in documents]


def whole(files: TokenFiles, rules: RowRules) -> RowBatch:
    rows = plan_rows(files, "train", rules)
    assert rows is not None
    return rows.read(np.arange(len(rows.counted)))


def pieces(document: Document, length: int, long: LongDocuments) -> list[Document]:
    """What the rules make of a document, written the slow way."""
    ids, counts = document
    if long == "cut":
        return [(ids[: length + 1], counts[: length + 1])]
    return [
        (ids[start : start + length + 1], counts[start : start + length + 1])
        for start in range(0, max(1, len(ids) - 1), length)
    ]


@SETTINGS
@given(
    documents=DOCUMENTS,
    length=st.integers(1, 12),
    long=st.sampled_from(["cut", "split"]),
    packing=st.sampled_from(["documents", "none"]),
    per_shard=st.integers(1, 30),
)
def test_rows_hold_each_document_once(
    files: TokenFiles,
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[tuple[int, int]]],
    length: int,
    long: LongDocuments,
    packing: Packing,
    per_shard: int,
) -> None:
    train = spread(documents)
    wanted = [piece for each in train for piece in pieces(each, length, long)]
    wanted = [(ids, counts) for ids, counts in wanted if any(counts[1:])]
    folder = tmp_path_factory.mktemp("rows") / "files"
    got = write_flagged(folder, files, train, HELD, shard_bytes=2 * per_shard)
    rules = RowRules(length, packing, long)
    if not wanted:
        with pytest.raises(DataError, match="no row of the train split has a label that counts"):
            plan_rows(got, "train", rules)
        return
    rows = plan_rows(got, "train", rules)
    assert isinstance(rows, DocumentRows)
    read = whole(got, rules)
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for inputs, labels, places in zip(
        read.inputs.tolist(),
        read.labels.tolist(),
        [None] * len(read.inputs) if read.positions is None else read.positions.tolist(),
        strict=True,
    ):
        starts = [0] if places is None else [n for n, place in enumerate(places) if place == 0]
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            if places is not None:
                assert places[start:end] == list(range(end - start))
            found.append((tuple(inputs[start:end]), tuple(labels[start:end])))
    padding = (files.end_of_text, NOT_COUNTED)
    expected: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for ids, counts in wanted:
        labels = [t if c else NOT_COUNTED for t, c in zip(ids[1:], counts[1:], strict=True)]
        fill = length - len(labels) if packing == "none" else 0
        expected[(*ids[:-1], *[padding[0]] * fill), (*labels, *[padding[1]] * fill)] += 1
    real = Counter(each for each in found if any(label >= 0 for label in each[1]))
    assert real == expected
    # Everything else is padding.
    for inputs, labels in found:
        if not any(label >= 0 for label in labels):
            assert set(inputs) == {padding[0]}
    assert rows.counted.tolist() == [int((row >= 0).sum()) for row in read.labels]
    filling = rows.filling
    assert filling.labels == int(rows.counted.sum()) == sum(sum(c[1:]) for _, c in wanted)
    assert filling.filled == pytest.approx(sum(len(i) - 1 for i, _ in wanted) / read.inputs.size)
    assert filling.documents == len(train)


@SETTINGS
@given(documents=DOCUMENTS, length=st.integers(1, 12))
def test_a_stream_counts_what_is_flagged(
    files: TokenFiles,
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[tuple[int, int]]],
    length: int,
) -> None:
    train = spread(documents)
    got = write_flagged(tmp_path_factory.mktemp("rows") / "files", files, train, HELD)
    ids, counts = ([x for each in train for x in each[part]] for part in (0, 1))
    starts = [n for n in range(0, len(ids) - length, length) if any(counts[n + 1 : n + length + 1])]
    rules = RowRules(length)
    if not starts:
        with pytest.raises(DataError, match="no row of the train split"):
            plan_rows(got, "train", rules)
        return
    assert isinstance(plan_rows(got, "train", rules), StreamRows)
    read = whole(got, rules)
    assert read.positions is None
    assert read.inputs.tolist() == [ids[n : n + length] for n in starts]
    for labels, n in zip(read.labels.tolist(), starts, strict=True):
        both = zip(ids[n + 1 : n + length + 1], counts[n + 1 : n + length + 1], strict=True)
        assert labels == [token if count else NOT_COUNTED for token, count in both]


@pytest.fixture
def flagged(files: TokenFiles, tmp_path: Path) -> TokenFiles:
    draw = np.random.default_rng(0)
    train = [
        (draw.integers(1, 200, n).tolist(), draw.integers(0, 2, n).tolist())
        for n in draw.integers(2, 30, 60)
    ]
    return write_flagged(tmp_path / "flagged", files, train, HELD)


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
def test_a_range_is_the_same_however_it_is_read(flagged: TokenFiles, packing: Packing) -> None:
    space = SequenceSpace(flagged, seed=3, sequence_length=16, packing=packing)
    count = 2 * space.sequences_per_epoch + 3
    all_ = space.read(0, count)
    assert isinstance(all_, RowBatch)
    for start in range(0, count, 7):
        some = space.read(start, min(7, count - start))
        assert isinstance(some, RowBatch)
        for one, other in zip(some, all_.take(slice(start, start + 7)), strict=True):
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other)
        assert space.counted(start, len(some.inputs)) == some.counted
    epoch = space.positions(0, space.sequences_per_epoch)
    assert sorted(epoch.tolist()) == list(range(space.sequences_per_epoch))


def test_other_rules_are_another_order(flagged: TokenFiles) -> None:
    def first(**rules: str) -> list[int]:
        space = SequenceSpace(flagged, seed=3, sequence_length=16, **rules)  # type: ignore[arg-type]
        return [hash(space._identity), *space.positions(0, 9).tolist()]

    ways = [first(), first(packing="documents"), first(packing="none"),
            first(packing="documents", long_documents="split")]  # fmt: skip
    assert len({way[0] for way in ways}) == 4


def test_text_is_packed_by_its_end_of_text(files: TokenFiles) -> None:
    rules = RowRules(128, "documents", "split")
    read = whole(files, rules)
    ends = files.document_ends("train")
    lengths = np.diff(ends, prepend=0)
    rows = plan_rows(files, "train", rules)
    assert rows is not None
    # All tokens but the first of each document.
    assert rows.filling.labels == int((lengths - 1).sum()) == read.counted
    assert rows.filling.split == int((lengths - 1 > 128).sum()) > 0
    assert rows.filling.left_out == 0
    assert plan_rows(files, "train", RowRules(128)) is None


def test_too_long_a_document_can_be_refused(files: TokenFiles) -> None:
    longest = int(np.diff(files.document_ends("train"), prepend=0).max()) - 1
    rules = RowRules(longest - 1, "documents", "refuse")
    message = rf"data.long_documents: \d+ of \d+ documents of the train .*needs {longest}\): raise"
    with pytest.raises(DataError, match=message):
        check_lengths(files, rules)
    check_lengths(files, RowRules(longest, "documents", "refuse"))


def test_cut_documents_are_counted(flagged: TokenFiles) -> None:
    rows = plan_rows(flagged, "train", RowRules(8, "documents", "cut"))
    assert rows is not None
    lengths = np.diff(flagged.document_ends("train"), prepend=0) - 1
    assert 0 < rows.filling.cut <= int((lengths > 8).sum())
    assert rows.filling.split == 0


def test_held_out_rows_are_spread_and_bounded(files: TokenFiles, tmp_path: Path) -> None:
    documents: list[Document] = [([n + 1, 7, 8], [0, 1, 1]) for n in range(10)]
    got = write_flagged(tmp_path / "held", files, documents, documents)
    some = held_out(got, RowRules(4, "none"), 5)
    assert isinstance(some, RowBatch)
    assert some.inputs[:, 0].tolist() == [1, 3, 5, 7, 9]
    every = held_out(got, RowRules(4, "none"), 99)
    assert isinstance(every, RowBatch)
    assert len(every.inputs) == 10


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
def test_an_epoch_has_seen_the_documents(flagged: TokenFiles, packing: Packing) -> None:
    space = SequenceSpace(
        flagged, seed=3, sequence_length=16, packing=packing, long_documents="split"
    )
    found = seen_documents(flagged, space, [(0, space.sequences_per_epoch)])
    assert space.rows is not None
    if packing == "stream":
        assert sum(each.seen for each in found) == 16 * space.sequences_per_epoch
        return
    assert len(found) == space.rows.filling.documents - space.rows.filling.left_out
    assert sum(each.seen == each.tokens for each in found) > len(found) // 2
    assert all(0 < each.seen <= each.tokens for each in found)
    one = seen_documents(flagged, space, [(0, 1)])
    read = space.read(0, 1)
    assert isinstance(read, RowBatch)
    assert sum(each.seen for each in one) >= read.counted


def test_show_says_how_full_rows_are(corpus: Path, tmp_path: Path) -> None:
    made = prepare(
        section(corpus, packing="documents", long_documents="cut", sequence_length=64),
        tmp_path / "data",
        seed=0,
    )
    text = show(made)
    assert re.search(
        r"^rows +train, documents, 64 positions: [\d,]+ rows, \d+\.\d % of their positions filled; "
        r"[\d,]+ labels count; [\d,]+ of [\d,]+ documents cut$",
        text,
        re.MULTILINE,
    )
    # Rules of a later run file.
    assert "validation, none, 32 positions" in show(made, RowRules(32, "none", "split"))
    assert "rows  " not in show(made, RowRules(32))


def test_text_files_do_not_know_of_rows(files: TokenFiles, corpus: Path, tmp_path: Path) -> None:
    """Neither rules of rows nor anything of them is in token files of a stream."""
    assert "rows" not in files.manifest["made_with"]
    assert not {"packing", "long_documents"} & set(files.manifest["made_with"]["options"])
    packed = prepare(section(corpus, packing="none"), tmp_path / "data", seed=0)
    assert packed.digest == files.digest
