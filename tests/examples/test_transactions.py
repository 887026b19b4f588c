"""The example about payments: the data, its text, and the AUROC."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.example_scripts import script

pytestmark = pytest.mark.waits

make_data, score = script("transactions", "make_data"), script("transactions", "score")


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_of_the_table_is_a_record(tmp_path: Path) -> None:
    make_data.write(tmp_path, 300, 100, seed=3)
    with (tmp_path / "payments.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    records = [*lines(tmp_path / "train.jsonl"), *lines(tmp_path / "held-out.jsonl")]
    assert len(rows) == len(records) == 400
    assert len(lines(tmp_path / "held-out.jsonl")) == 100
    for row, record in zip(rows, records, strict=True):
        assert record["completion"] == row.pop("fraud")
        asked, *columns = record["prompt"].split("\n")
        assert asked == make_data.QUESTION
        assert dict(column.split(": ") for column in columns) == row
    share = sum(record["completion"] == "yes" for record in records) / 400
    assert 0.1 < share < 0.3


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_data.write(tmp_path / name, 20, 20, seed)
        files = sorted((tmp_path / name).iterdir())
        digests.append(hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_the_labels_follow_the_probabilities(tmp_path: Path) -> None:
    _, labels, chances = make_data.payments(4000, seed=0)
    assert 0.85 < score.auroc(chances, labels) < 0.95
    assert sum(labels) == pytest.approx(sum(chances), rel=0.1)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30))
def test_auroc_counts_pairs(found: list[tuple[int, bool]]) -> None:
    good = [value for value, label in found if label]
    bad = [value for value, label in found if not label]
    scores, labels = [float(value) for value, _ in found], [label for _, label in found]
    if not good or not bad:
        with pytest.raises(ValueError, match="positives and negatives"):
            score.auroc(scores, labels)
        return
    pairs = [(a > b) + (a == b) / 2 for a in good for b in bad]
    assert score.auroc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))


def test_a_score_that_is_not_a_number_is_no_rank() -> None:
    with pytest.raises(ValueError, match="not a number"):
        score.auroc([0.0, float("nan")], [True, False])
