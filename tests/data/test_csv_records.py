from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.data.conversations import Layout, read_conversations
from dilocox.data.csv_records import csv_records
from dilocox.data.readers import read_documents
from dilocox.errors import DataError


def read(path: Path, text: str | bytes, *numbers: str) -> list[tuple[str, Any]]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [
        (where.removeprefix(f"{path}:"), record) for where, record in csv_records(path, numbers)
    ]


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
def test_rows_are_records_with_their_first_line(tmp_path: Path, separator: str) -> None:
    text = '\ufeffid,"a note"\r\n1,"one, ""two""\r\nthree"\r\n\r\n2,\r\n'.replace(",", separator, 1)
    text = text.replace("1,", f"1{separator}").replace("2,", f"2{separator}")
    expected = [
        ("2", {"id": "1", "a note": 'one, "two"\r\nthree'}),
        ("5", {"id": "2", "a note": ""}),
    ]
    assert read(tmp_path / "a.csv", text) == expected
    assert read(tmp_path / "a.csv.gz", gzip.compress(text.encode())) == expected


def test_a_tsv_file_has_tabs(tmp_path: Path) -> None:
    text = "a, b, c\td\n1\t2\n"
    assert read(tmp_path / "a.tsv", text) == [("2", {"a, b, c": "1", "d": "2"})]
    assert read(tmp_path / "a.tsv", "") == []
    assert read(tmp_path / "A.TSV", "a,b\n1,2\n") == [("2", {"a,b": "1,2"})]
    assert read(tmp_path / "a.tsv.csv", "a,b\n1,2\n") == [("2", {"a": "1", "b": "2"})]
    with pytest.raises(DataError, match=r"a\.tsv:2: a quoted field holds a tab and a line end"):
        read(tmp_path / "a.tsv", 'a\tb\n"x\t0\ny\t1\nz"\t0\n')


def test_lines_before_the_names(tmp_path: Path) -> None:
    expected = [("4", {"a,b": "1", "c": "2"})]
    assert read(tmp_path / "a.csv", '\nsep=;\n"a,b";c\n1;2\n') == expected
    assert read(tmp_path / "a.csv", '\n\n"a,b";c\n1;2\n') == expected


def test_numbers_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    text = "a,b,c,e\n1,2.5,x,1_0\n"
    [(_, record)] = read(tmp_path / "a.csv", text, "b", "c", "d", "e")
    assert record == {"a": "1", "b": 2.5, "c": "x", "e": "1_0"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n3\n", r"a\.csv:3: 1 fields, and the first line names 2; put fields that"),
        ('a,b\n"1\n2",3,4\n', r"a\.csv:2: 3 fields, and the first line names 2"),
        ("a,b,a\n", r'a\.csv:1: 2 columns are named "a"; rename all but one'),
        ('a,b\n"1"2,3\n', r"a\.csv:2: not valid CSV \(.*\); correct the row"),
        (b"a,b\n\xff,1\n", r"a\.csv: not UTF-8 text \(.*iconv -f CP1252"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str | bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read(tmp_path / "a.csv", text)


_FIELDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6)


@given(rows=st.lists(st.tuples(_FIELDS, _FIELDS), max_size=4))
def test_what_a_writer_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    assert [record for _, record in csv_records(path)] == [{"a": a, "b": b} for a, b in rows]


def test_csv_holds_text_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,n\none,1\n,2\nthree,3\n")
    documents = list(read_documents(path, "csv", "text", columns=("n",)))
    assert documents == ["one", "three"]
    assert [each.columns for each in documents] == [(1.0,), (3.0,)]  # type: ignore[attr-defined]
    messages = json.dumps([{"role": "user", "content": "a"}]).replace('"', '""')
    path.write_text(f'id,messages\n1,"{messages}"\n2,\n')
    left: list[int] = []
    made = list(read_conversations(path, "csv", Layout("chat"), lambda: left.append(1)))
    assert [json.loads(each)["messages"][0]["content"] for each in made] == ["a"]
    assert left == [1]
    with pytest.raises(DataError, match=r'a\.csv:2: no field "text" \(fields: id, messages\)'):
        list(read_documents(path, "csv", "text"))
