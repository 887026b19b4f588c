"""The corpus in parts, and token files of which no site trains on what is held out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.quality import data as quality_data
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data import TokenFiles

documents = st.lists(st.text("ab \n", min_size=1, max_size=40), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents, st.integers(1, 5))
def test_parts_are_contiguous_whole_and_about_equal(texts: list[str], parts: int) -> None:
    try:
        runs = quality_data.contiguous(texts, parts)
    except ValueError:
        # Only where some document is as long as a part, or there are too few.
        longest = max(len(text) for text in texts)
        assert len(texts) < parts or longest * parts >= sum(len(text) for text in texts)
        return
    assert len(runs) == parts
    assert [text for run in runs for text in run] == texts
    mean = sum(len(text) for text in texts) / parts
    longest = max(len(text) for text in texts)
    assert all(abs(sum(len(text) for text in run) - mean) <= longest for run in runs)


def test_cutting_loses_nothing_and_ends_at_blank_lines() -> None:
    line = "x" * 100 + "\n"
    text = (line * 9 + "\n") * 40
    pieces = list(quality_data.cut(text))
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert all(piece.endswith("\n\n") for piece in pieces)
    assert all(len(piece) >= quality_data.DOCUMENT for piece in pieces[:-1])


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> quality_data.Text:
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(300, 500))) for _ in range(400)]
    monkeypatch.setattr(quality_data, "read_corpus", lambda _wikitext: texts)
    return quality_data.Text.write(tmp_path / "text", None)


def test_what_is_held_out_is_trained_on_nowhere(text: quality_data.Text) -> None:
    text.tokenise(3, [2, 4])
    whole = TokenFiles.open(text.mixture(3))
    assert whole.vocabulary_size == quality_data.VOCABULARY
    held = _sequence(whole, "validation")
    assert len(held) > 0
    for sites in (2, 4):
        own = [TokenFiles.open(text.site(3, site, sites)) for site in range(sites)]
        for split in ("train", "validation"):
            together = [token for files in own for token in _sequence(files, split)]
            assert together == _sequence(whole, split)


def test_another_seed_holds_out_other_text(text: quality_data.Text) -> None:
    for seed in (0, 1):
        text.tokenise(seed, [])
    held = [_sequence(TokenFiles.open(text.mixture(seed)), "validation") for seed in (0, 1)]
    assert held[0] != held[1]


def _sequence(files: TokenFiles, split: str) -> list[int]:
    import numpy as np

    count = files.token_count(split)
    return [int(t) for t in files.tokens(split).gather(np.array([0]), count)[0]]


def test_a_folder_of_another_text_is_refused(tmp_path: Path) -> None:
    """Else the options would name one text, and the rows would be of another."""
    folder = tmp_path / "text"
    first, second = ([[f"{name}{part}"] for part in range(4)] for name in "ab")
    quality_data.Text.write_parts(folder, lambda: first)
    quality_data.Text.write_parts(folder, lambda: first)
    with pytest.raises(SystemExit, match="holds another text than these options ask for"):
        quality_data.Text.write_parts(folder, lambda: second)
    assert '"a0"' in quality_data.Text(folder).part(0).read_text()
    # A call that was killed has left the first parts alone.
    quality_data.Text(folder).part(3).unlink()
    quality_data.Text.write_parts(folder, lambda: first)
    assert '"a3"' in quality_data.Text(folder).part(3).read_text()
