from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.data import TokenFiles, prepare, show
from dilocox.data.manifest import MANIFEST
from dilocox.data.record_filter import RecordFilter, filter_text
from dilocox.errors import DataError
from tests.data.chats import chat_section, talks
from tests.data.conftest import section, story


def records(count: int = 60) -> list[dict[str, Any]]:
    """Stories with a language, stars, and an object; every seventh has no stars."""
    made = []
    for number in range(count):
        record: dict[str, Any] = {
            "text": story(number),
            "language": ("en", "de", "fr")[number % 3],
            "meta": {"year": 2000 + number % 5, "checked": number % 2 == 0},
        }
        if number % 7 != 3:
            record["stars"] = number % 6
        made.append(record)
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines, a JSON array or Parquet, by the file's name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_filter_takes_the_records_that_have_all_values(tmp_path: Path, name: str) -> None:
    wanted = {"language": ["en", "de"], "stars": [4, 5.0], "meta": {"checked": True}}
    rows = records()
    kept = [
        row
        for row in rows
        if row["language"] != "fr" and row.get("stars") in (4, 5) and row["meta"]["checked"]
    ]
    assert 0 < len(kept) < len(rows)
    data = section(write(tmp_path / name, rows), filter=wanted)
    files = prepare(data, tmp_path / "data", seed=0)
    by_hand = prepare(section(write(tmp_path / "kept.jsonl", kept)), tmp_path / "by-hand", seed=0)
    for split in ("train", "validation"):
        assert files.content["splits"][split] == by_hand.content["splits"][split]
    flat = {"language": ["en", "de"], "stars": [4, 5.0], "meta.checked": True}
    assert files.content["sources"][0]["filter"] == flat
    assert files.filtered == (len(kept), len(rows))
    said = f"{len(kept)} of 60 records were taken"
    assert (
        f'filter       language = "en" or "de", meta.checked = true, stars = 4 or 5.0: {said}'
        in show(files)
    )
    assert prepare(data, tmp_path / "data", seed=0).digest == files.digest
    files.verify()


def test_token_files_without_a_filter_do_not_speak_of_one(tmp_path: Path) -> None:
    files = prepare(section(write(tmp_path / "a.jsonl", records())), tmp_path / "data", seed=0)
    assert "filter" not in (files.folder / MANIFEST).read_text()
    assert files.filtered is None


def test_another_filter_is_another_option(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", records())
    for number, (first, second) in enumerate(
        [(None, {"language": "en"}), ({"language": "en"}, None), ({"stars": 1}, {"stars": 2})]
    ):
        folder = tmp_path / f"data{number}"
        prepare(section(source, filter=first), folder, seed=0)
        with pytest.raises(DataError, match=r"made with other options \(filter "):
            prepare(section(source, filter=second), folder, seed=0)


def test_token_files_of_several_sources_made_before_filters_are_taken(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", records())
    tables = [{"name": name, "source": str(source)} for name in "ab"]
    data = section(None, sources=tables)
    files = prepare(data, tmp_path / "data", seed=0)
    options = files.manifest["made_with"]["options"]
    assert not any("filter" in key for table in options["sources"] for key in table)
    assert prepare(data, tmp_path / "data", seed=0).digest == files.digest
    other = section(None, sources=[tables[0], {**tables[1], "filter": {"language": "en"}}])
    with pytest.raises(DataError, match=r"made with other options \(sources "):
        prepare(other, tmp_path / "data", seed=0)


def test_sources_have_filters_of_their_own(tmp_path: Path) -> None:
    source = str(write(tmp_path / "a.jsonl", records()))
    tables: list[dict[str, Any]] = [
        {"name": "usual", "source": source},
        {"name": "german", "source": source, "filter": {"language": "de"}},
        {"name": "all", "source": source, "filter": {}},
    ]
    data = section(None, sources=tables, filter={"language": ["en", "fr"]})
    files = prepare(data, tmp_path / "data", seed=0)
    counts = [
        sum(
            part["documents"]
            for split in ("train", "validation")
            for part in files.content["splits"][split]["parts"]
            if part["name"] == table["name"]
        )
        for table in tables
    ]
    assert counts == [40, 20, 60]
    assert [each.get("filter") for each in files.content["sources"]] == [
        {"language": ["en", "fr"]}, {"language": "de"}, None,
    ]  # fmt: skip
    assert files.manifest["made_with"]["filtered"] == [[40, 60], [20, 60], None]


def held_and_trained(files: TokenFiles) -> tuple[int, int]:
    return files.document_count("validation"), files.document_count("train")


def test_held_out_text_has_the_same_filter_or_one_of_its_own(tmp_path: Path) -> None:
    source = str(write(tmp_path / "a.jsonl", records()))
    given = {"validation_source": source, "filter": {"language": "en"}}
    same = prepare(section(source, **given), tmp_path / "same", seed=0)
    assert held_and_trained(same) == (20, 20)
    own = section(source, **given, validation_filter={"meta.year": [2000, 2001]})
    assert held_and_trained(prepare(own, tmp_path / "own", seed=0)) == (24, 20)
    none = section(source, **given, validation_filter={})
    assert held_and_trained(prepare(none, tmp_path / "none", seed=0)) == (60, 20)


def test_the_largest_number_of_documents_counts_those_that_are_taken(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", records())
    data = section(source, filter={"language": "fr"}, max_documents=7)
    files = prepare(data, tmp_path / "data", seed=0)
    assert sum(held_and_trained(files)) == 7
    assert files.filtered == (7, 21)


def test_conversations_are_filtered_by_fields_beside_the_messages(tmp_path: Path) -> None:
    rows = [row | {"queue": "bank" if n % 4 else "shop"} for n, row in enumerate(talks())]
    data = chat_section(tmp_path, rows, filter={"queue": "bank"})
    files = prepare(data, tmp_path / "data", seed=0)
    assert (sum(held_and_trained(files)), files.filtered) == (30, (30, 40))
    write(tmp_path / "chats.parquet", rows)
    changed = data.model_copy(update={"source": str(tmp_path / "chats.parquet")})
    table = prepare(changed, tmp_path / "table", seed=0)
    assert table.content["splits"] == files.content["splits"]
    assert table.filtered == (30, 40)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"langauge": "en"},
            r'a.jsonl: none of the 60 records has the field "langauge" of the filter '
            r"\(fields: language, meta, stars, text\); correct the filter",
        ),
        (
            {"meta.yaer": 2000},
            r'has the field "meta.yaer" of the filter \(fields: meta.checked, meta.year\)',
        ),
        ({"text.title": "a"}, r'has the field "text.title" of the filter \(fields: language'),
        (
            {"language": "it", "stars": 1},
            r"a.jsonl: the filter takes none of the 60 records \(language is \"en\", \"de\", "
            r"\"fr\"; stars is 0, 1, 2, (4, 5, 3|null, 4, 5, …)\); correct the filter",
        ),
        ({"stars": "4"}, r"takes none of the 60 records \(stars is 0, 1"),
        ({"stars": True}, r"takes none of the 60 records \(stars is 0, 1"),
        ({"meta": "a"}, r"takes none of the 60 records \(meta is an object\)"),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_filter_that_takes_nothing_is_refused(
    tmp_path: Path, wanted: dict[str, Any], message: str, ending: str
) -> None:
    source = write(tmp_path / f"a.{ending}", records())
    # Arrow writes a missing field as null.
    with pytest.raises(DataError, match=message.replace("jsonl", ending)) as caught:
        prepare(section(source, filter=wanted), tmp_path / "data", seed=0)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_one_of_several_files_may_give_nothing(tmp_path: Path) -> None:
    rows = records()
    names = [str(write(tmp_path / f"{n}.jsonl", rows[n : n + 20])) for n in (0, 20, 40)]
    late = {"text": story(99), "only": 1}
    write(Path(names[2]), [*rows[40:], late, late | {"text": story(98)}])
    data = section(names, filter={"only": 1}, sequence_length=8, validation_fraction=0.5)
    files = prepare(data, tmp_path / "data", seed=0)
    assert files.filtered == (2, 62)


def test_a_filter_on_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mixed").mkdir()
    write(tmp_path / "mixed" / "a.jsonl", records())
    (tmp_path / "mixed" / "b.txt").write_text(story(0))
    for source in (tmp_path / "mixed", tmp_path / "mixed" / "b.txt"):
        with pytest.raises(DataError, match=r"a filter needs records .*, and b.txt is text; leave"):
            prepare(section(source, filter={"language": "en"}), tmp_path / "data", seed=0)


def test_a_dataset_of_the_hub_is_filtered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.parquet", records())
    data = section(tmp_path / "set", format="hub", filter={"language": "de", "meta.checked": False})
    files = prepare(data, tmp_path / "data", seed=0)
    assert (files.filtered, sum(held_and_trained(files))) == ((10, 60), 10)
    missing = data.model_copy(update={"filter": {"lang": "de"}})
    with pytest.raises(DataError, match=r'no column "lang" of the filter \(columns: text, lang'):
        prepare(missing, tmp_path / "missing", seed=0)
    nothing = data.model_copy(update={"filter": {"language": "it"}})
    with pytest.raises(DataError, match=r"set: the filter takes none of the 60 records"):
        prepare(nothing, tmp_path / "nothing", seed=0)


def test_a_split_of_files_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", records())
    with pytest.raises(DataError, match=r'data.split is "test", which hub datasets alone have: '):
        prepare(section(source, split="test"), tmp_path / "data", seed=0)
    files = prepare(section(source), tmp_path / "data", seed=0)
    # Token files of before, whose split had no effect, stay as they are.
    made_with = {**files.manifest["made_with"]}
    made_with["options"] = made_with["options"] | {"split": "test"}
    from dilocox.data.manifest import render

    (files.folder / MANIFEST).write_text(render(files.content, made_with))
    assert prepare(section(source, split="test"), tmp_path / "data", seed=0).digest == files.digest


scalars = st.one_of(st.text(max_size=3), st.integers(-2, 2), st.booleans(), st.sampled_from([0.5]))


@given(value=scalars, choices=st.lists(scalars, min_size=1, max_size=4))
def test_a_value_is_equal_to_one_of_its_kind_alone(value: Any, choices: list[Any]) -> None:
    same = [c for c in choices if json.dumps(c) == json.dumps(value)]
    assert RecordFilter({"a": choices}).takes({"a": value}) == bool(same)
    assert RecordFilter({"a.b": choices}).takes({"a": {"b": value}}) == bool(same)
    # A field whose name has a dot goes before a nested one.
    assert RecordFilter({"a.b": choices}).takes({"a.b": value, "a": {"b": None}}) == bool(same)


@pytest.mark.parametrize(
    ("choice", "texts", "others"),
    [
        (4, ["4", "4.0", " 4", "04"], ["5", "four", "", "true", "4_"]),
        (1000, ["1000", "1e3"], ["1_000", "1,000"]),
        (0.5, ["0.5", ".5", "5e-1"], ["0", "half", "nan"]),
        (2**63 + 1, [str(2**63 + 1)], [str(2**63)]),
        (True, ["true", "True", "TRUE"], ["1", "yes", "false", ""]),
        (False, ["false", "False"], ["0", "", "true"]),
        ("4", ["4"], ["4.0", " 4"]),
    ],
)
def test_in_csv_numbers_and_truth_values_are_written_as_text(
    choice: Any, texts: list[str], others: list[str]
) -> None:
    wanted = RecordFilter({"a": choice})
    assert [text for text in texts + others if wanted.takes({"a": text}, typed=False)] == texts
    assert not any(wanted.takes({"a": text}) for text in texts if text != choice)
    # The values of data.columns are numbers in CSV, too.
    assert RecordFilter({"a": 4}).takes({"a": 4.0}, typed=False)


def test_rows_of_csv_are_filtered_beside_records_of_json(tmp_path: Path) -> None:
    rows = records()
    write(tmp_path / "a.jsonl", rows)
    with (tmp_path / "b.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, ["stars", "text"], extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    sources = [{"name": name[0], "source": str(tmp_path / name)} for name in ("a.jsonl", "b.csv")]
    data = section(None, sources=sources, filter={"stars": 4})
    files = prepare(data, tmp_path / "data", seed=0)
    taken = sum(row.get("stars") == 4 for row in rows)
    assert files.manifest["made_with"]["filtered"] == [[taken, 60], [taken, 60]]


def test_filters_as_text() -> None:
    assert filter_text({"a": "x" * 50, "b.c": [1, True]}) == f'a = "{"x" * 38}…, b.c = 1 or true'
