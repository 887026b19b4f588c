"""Columns beside tokens: written, read along with labels, and found when they are changed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.data import DataSection, RowRules
from dilocox.data import SequenceSpace, TokenFiles, prepare, show
from dilocox.data.columns import targets
from dilocox.data.croissant import croissant
from dilocox.data.packing import Packer
from dilocox.data.rows import RowBatch, plan_rows
from dilocox.errors import DataError
from tests.data.chat_templates import CHATML
from tests.data.chats import write_records
from tests.data.conftest import section, story

COLUMNS = ["weight", "age"]


def records(count: int = 40, words: int = 30) -> list[dict[str, Any]]:
    """Texts, each of which begins with its number, with columns of its own."""
    return [
        {"text": story(number, words), "weight": number / 8, "age": -number}
        for number in range(count)
    ]


def made(folder: Path, source: Path, **changes: Any) -> TokenFiles:
    given = {"format": "jsonl", "columns": COLUMNS} | changes
    return prepare(section(source, **given), folder, seed=0)


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> TokenFiles:
    """Read-only."""
    place = tmp_path_factory.mktemp("weighed")
    return made(place / "data", write_records(place / "texts.jsonl", records()))


def numbers(files: TokenFiles, split: str, name: str) -> Any:
    column = files.columns(split)[name]
    return column.gather(np.zeros(1, dtype=np.int64), len(column))[0]


def test_every_token_has_the_number_of_its_record(weighed: TokenFiles) -> None:
    assert weighed.manifest["format"] == 4
    assert weighed.column_names == ["age", "weight"]
    found = {}
    for split in ("train", "validation"):
        weights, ages = (numbers(weighed, split, name) for name in COLUMNS)
        assert weights.dtype == np.float32
        assert (weights * -8 == ages).all()
        ends = weighed.document_ends(split)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            assert len(set(ages[start:end])) == 1
            found[-int(ages[start])] = split
    assert sorted(found) == list(range(40))
    assert set(found.values()) == {"train", "validation"}
    assert "columns      age, weight: one float32 number per token" in show(weighed)
    described = croissant(weighed.content)["distribution"]
    files = {each["name"]: each for each in described}
    tokens = weighed.token_count("train")
    assert files["train-00000.age.col"]["contentSize"] == f"{4 * tokens} B"
    weighed.verify()


def test_all_formats_give_the_same_columns(tmp_path: Path, weighed: TokenFiles) -> None:
    lines = "\n".join(json.dumps(each) for each in records())
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pa.Table.from_pylist([dict(reversed(each.items())) for each in records()])
    pq.write_table(table, tmp_path / "texts.parquet")
    pytest.importorskip("datasets")
    hub = tmp_path / "hub"
    hub.mkdir()
    pq.write_table(table, hub / "train.parquet")
    for number, (source, kind) in enumerate(
        [("packed.jsonl.gz", "jsonl"), ("texts.parquet", "parquet"), ("hub", "hub")]
    ):
        other = made(tmp_path / f"data{number}", tmp_path / source, format=kind)
        for split in ("train", "validation"):
            for name in COLUMNS:
                assert (numbers(other, split, name) == numbers(weighed, split, name)).all()


@pytest.mark.parametrize("form", ["chat", "instruction"])
def test_conversations_have_columns(tmp_path: Path, form: str) -> None:
    (tmp_path / "template.jinja").write_text(CHATML, encoding="utf-8")
    chats: list[dict[str, Any]] = []
    for number in range(12):
        pair = {"prompt": f"Number {number}?", "completion": story(number, 40)}
        turns = [
            {"role": "user", "content": pair["prompt"]},
            {"role": "assistant", "content": pair["completion"]},
        ]
        chats.append((pair if form == "instruction" else {"messages": turns}) | {"score": number})
    source = write_records(tmp_path / "chats.jsonl", chats)
    files = made(
        tmp_path / "data", source, format=form, columns=["score"], sequence_length=64,
        chat_template=str(tmp_path / "template.jinja"),
    )  # fmt: skip
    both = np.concatenate([numbers(files, split, "score") for split in ("train", "validation")])
    assert set(both) == set(range(12))
    del chats[3]["score"]
    with pytest.raises(DataError, match=r'chats\.jsonl:4: column "score" is missing or null; give'):
        made(
            tmp_path / "more", write_records(tmp_path / "chats.jsonl", chats), format=form,
            columns=["score"], chat_template=str(tmp_path / "template.jinja"),
        )  # fmt: skip


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
@pytest.mark.parametrize("long", ["cut", "split"])
def test_columns_stand_beside_the_labels_of_rows(
    weighed: TokenFiles, packing: Any, long: Any
) -> None:
    space = SequenceSpace(weighed, seed=3, sequence_length=50, packing=packing, long_documents=long)
    rows = space.read(0, space.sequences_per_epoch)
    assert isinstance(rows, RowBatch)
    assert rows.columns is not None
    by_token: dict[tuple[int, ...], float] = {}
    ends, tokens = weighed.document_ends("train"), weighed.tokens("train")
    whole = tokens.gather(np.zeros(1, dtype=np.int64), len(tokens))[0]
    ages = numbers(weighed, "train", "age")
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        for at in range(start + 1, end - 2):
            by_token[tuple(whole[at : at + 3])] = (
                ages[at] if by_token.get(tuple(whole[at : at + 3]), ages[at]) == ages[at] else 1.0
            )
    seen = 0
    for labels, row in zip(rows.labels, rows.columns["age"], strict=True):
        assert (row[labels < 0] <= 0).all()
        for at in range(len(labels) - 2):
            wanted = by_token.get(tuple(labels[at : at + 3]), 1.0)
            if wanted <= 0:
                assert row[at] == wanted
                seen += 1
    assert seen > 100
    padding = (rows.labels < 0) & (rows.inputs == weighed.end_of_text)
    if packing != "stream":
        assert (rows.columns["age"][padding] == 0).all()


LISTS = st.lists(
    st.tuples(st.integers(1, 9), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    min_size=2,
    max_size=30,
)


@settings(max_examples=15, deadline=None)
@given(
    documents=LISTS,
    length=st.integers(2, 12),
    sizes=st.tuples(st.integers(9, 60), st.integers(1, 3)),
)
def test_shards_and_batches_keep_tokens_and_columns_together(
    tmp_path_factory: pytest.TempPathFactory,
    files: TokenFiles,
    documents: list[tuple[int, float]],
    length: int,
    sizes: tuple[int, int],
) -> None:
    """Each document's tokens are its number, so labels say which column they must have."""
    tokens, parts = sizes
    folder = tmp_path_factory.mktemp("columns") / "data"
    folder.mkdir()
    entries = {}
    for split in ("train", "validation"):
        packer = Packer(folder, split, 300, None, 2 * tokens, flagged=True, columns=["x"])
        each = -(-len(documents) // parts)
        for first in range(0, len(documents), each):
            some = list(enumerate(documents))[first : first + each]
            packer.add(
                [[number] * size for number, (size, _) in some],
                0,
                [(0, 0)] * len(some),
                None,
                [[value] for _, (_, value) in some],
            )
        packer.close()
        entries[split] = packer.describe()
    content = files.content | {"splits": entries, "dtype": "uint16"}
    own = TokenFiles(folder, {"content": content, "digest": f"{folder}{length}"})
    if all(size == 1 for size, _ in documents):
        return
    rows = plan_rows(own, "train", RowRules(length, "documents", "split"))
    assert rows is not None
    batch = rows.read(np.arange(len(rows.counted)))
    assert batch.columns is not None
    values = np.array([value for _, value in documents], dtype=np.float32)
    wanted = np.where(batch.labels >= 0, values[batch.labels.clip(0)], np.float32(0))
    assert (batch.columns["x"].view(np.int32) == wanted.view(np.int32)).all()
    packed = targets(batch.labels, batch.columns)
    assert (packed[:, 0] == batch.labels).all()
    assert (packed[:, 1] == wanted.view(np.int32)).all()


def test_sources_have_the_same_columns(tmp_path: Path) -> None:
    tables = []
    for name in ("one", "two"):
        source = write_records(tmp_path / f"{name}.jsonl", records(20))
        tables.append({"name": name, "source": str(source)})
    tables[1]["format"] = "jsonl"
    files = made(tmp_path / "data", None, sources=tables)  # type: ignore[arg-type]
    space = SequenceSpace.of(
        section(None, sources=tables, format="jsonl", columns=COLUMNS), files, seed=0
    )
    rows = space.read(0, 60)
    again = [space.read(number, 1) for number in range(60)]
    assert isinstance(rows, RowBatch)
    assert rows.columns is not None
    for number, one in enumerate(again):
        assert isinstance(one, RowBatch)
        assert one.columns is not None
        assert (rows.columns["age"][number] == one.columns["age"][0]).all()
        assert (rows.labels[number] == one.labels[0]).all()
    assert len({*rows.columns["age"].flatten()}) > 10


def test_a_changed_column_is_found_and_named(tmp_path: Path, weighed: TokenFiles) -> None:
    source = write_records(tmp_path / "texts.jsonl", records())
    same = made(tmp_path / "same", source)
    assert same.digest == weighed.digest
    changed = records()
    changed[7]["weight"] = 99
    other = write_records(tmp_path / "other.jsonl", changed)
    splits = [made(tmp_path / "other", other).content["splits"], same.content["splits"]]
    shards = [each["train"]["shards"] + each["validation"]["shards"] for each in splits]
    assert [each["sha256"] for each in shards[0]] == [each["sha256"] for each in shards[1]]
    assert shards[0] != shards[1]
    path = same.folder / "train-00000.weight.col"
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(DataError, match=r"train-00000\.weight\.col: its digest differs"):
        TokenFiles.open(same.folder).verify()
    path.write_bytes(raw[:-4])
    with pytest.raises(DataError, match=r"train-00000\.weight\.col: [\d,]+ bytes instead of"):
        TokenFiles.open(same.folder)
    path.unlink()
    with pytest.raises(DataError, match=r"train-00000\.weight\.col: missing"):
        TokenFiles.open(same.folder)


def test_token_files_with_other_columns_are_not_reused(tmp_path: Path) -> None:
    source = write_records(tmp_path / "texts.jsonl", records())
    made(tmp_path / "with", source)
    made(tmp_path / "without", source, columns=[])
    assert made(tmp_path / "without", source, columns=[]).manifest["format"] == 1
    made(tmp_path / "with", source)
    for folder, columns in (("with", []), ("without", ["age"]), ("with", ["age"])):
        with pytest.raises(DataError, match=r"columns .*(name the same columns|give the same opt)"):
            made(tmp_path / folder, source, columns=columns)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("3", 'column "age" is not a number; give every record a finite number there'),
        (True, 'column "age" is not a number'),
        (None, 'column "age" is missing or null'),
        (1e39, 'column "age" is no finite float32 number'),
        (10**400, 'column "age" is no finite'),
        (float("nan"), 'column "age" is no finite'),
    ],
)
def test_a_record_without_a_number_is_named(tmp_path: Path, value: Any, reason: str) -> None:
    bad = records(4)
    bad[2]["age"] = value
    source = write_records(tmp_path / "texts.jsonl", bad)
    with pytest.raises(DataError, match=rf"texts\.jsonl:3: {reason}"):
        made(tmp_path / "data", source)


def test_a_missing_column_of_a_table_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "age": [1, 2]}), tmp_path / "texts.parquet")
    with pytest.raises(DataError, match=r'no column "weight" \(columns: text, age\); set data'):
        made(tmp_path / "data", tmp_path / "texts.parquet", format="parquet")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"columns": ["a"]}, 'columns needs records, and format is "auto"'),
        ({"columns": ["a"], "format": "code"}, 'columns needs records, and format is "code"'),
        ({"columns": ["a", "a"], "format": "jsonl"}, "columns names one column twice"),
        ({"columns": ["a.b"], "format": "jsonl"}, "pattern"),
        (
            {
                "source": None,
                "format": "jsonl",
                "columns": ["a"],
                "sources": [{"name": "x", "source": "x", "format": "text"}],
            },
            'columns needs records, and format is "text"',
        ),
    ],
)
def test_columns_of_no_record_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DataSection.model_validate({"source": "x"} | keys)
