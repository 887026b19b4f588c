"""Token ranges to documents, against counting token by token."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.data import SequenceSpace, TokenFiles
from dilocox.data.coverage import covered, seen_documents


@given(
    st.sets(st.integers(0, 30), max_size=12), st.integers(1, 5),
    st.lists(st.integers(0, 160), min_size=1, max_size=5),
)  # fmt: skip
def test_covered_is_a_count(sequences: set[int], length: int, before: list[int]) -> None:
    read = {p * length + i for p in sequences for i in range(length)}
    found = covered(np.array(sorted(sequences), dtype=np.int64), length, np.array(before))
    assert found.tolist() == [sum(token < end for token in read) for end in before]


def test_documents_of_token_ranges(files: TokenFiles, corpus: Path) -> None:
    space = SequenceSpace(files, seed=0, sequence_length=16)
    found = seen_documents(files, space, [(0, 3), (5, 1)])
    tokens = np.fromfile(files.folder / "train-00000.bin", dtype=files.dtype)
    positions = np.concatenate([space.positions(0, 3), space.positions(5, 1)])
    read = {int(p) * 16 + i for p in positions for i in range(16)}
    start = 0
    expected = {}
    for number, end in enumerate((np.flatnonzero(tokens == files.end_of_text) + 1).tolist()):
        if count := len(read & set(range(start, end))):
            expected[number] = (end - start, count)
        start = end
    assert {each.document: (each.tokens, each.seen) for each in found} == expected
    assert sum(each.seen for each in found) == 4 * 16
    # A document's file is the one that its text is in.
    for each in found:
        text = (corpus / each.file).read_text()
        ends = files.document_ends("train")
        first = int(ends[each.document - 1]) if each.document else 0
        ids = tokens[first : first + each.tokens - 1].tolist()
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(files.tokenizer_folder / "tokenizer.json"))
        assert tokenizer.decode(ids) == text


def test_a_whole_epoch_has_seen_all_but_the_last_part_of_a_sequence(files: TokenFiles) -> None:
    space = SequenceSpace(files, seed=0, sequence_length=16)
    found = seen_documents(files, space, [(0, space.sequences_per_epoch)])
    assert len(found) == files.document_count("train")
    assert sum(each.seen for each in found) == space.sequences_per_epoch * 16
    twice = seen_documents(files, space, [(0, 2 * space.sequences_per_epoch)])
    assert twice == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].seen = 0  # type: ignore[misc]


def test_nothing_was_read(files: TokenFiles) -> None:
    assert seen_documents(files, SequenceSpace(files, seed=0, sequence_length=16), []) == []
