from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data import readers
from dilocox.data.readers import clean, cut_point, read_documents
from dilocox.errors import DataError

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)


def read(path: Path, kind: str, field: str = "text") -> list[str]:
    return list(read_documents(path, kind, field))


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


@SETTINGS
@given(
    text=st.text(alphabet="ab\n", max_size=400),
    after=st.integers(1, 40),
)
def test_cutting_loses_nothing_and_bounds_documents(text: str, after: int) -> None:
    pieces, start = [], 0
    while (end := cut_point(text, start, after)) is not None:
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    assert "".join(pieces) == text
    assert all(after < len(piece) <= 2 * after + 2 for piece in pieces[:-1])
    assert len(pieces[-1]) <= 2 * after


def test_cut_prefers_blank_lines_then_line_ends() -> None:
    assert cut_point("aaaa\naa\n\naaaaaaaaaaaaa", 0, 5) == 9
    assert cut_point("aaaaaa\naaaaaaaaaaaaaaa", 0, 5) == 7
    assert cut_point("a" * 11, 0, 5) == 10
    assert cut_point("a" * 10, 0, 5) is None


def test_short_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffgrüße\r\n\r\nzwei\n".encode())
    assert read(path, "text") == ["grüße\r\n\r\nzwei\n"]


@pytest.mark.parametrize("block", [7, 100, 1 << 20])
def test_long_text_file_is_cut_alike_for_any_block(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {number} é\n" + "\n" * (number % 5 == 0) for number in range(500))
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setitem(readers.CUT, "text", 200)
    whole = read(path, "text")
    monkeypatch.setattr(readers, "BLOCK", block)
    assert read(path, "text") == whole
    assert "".join(whole) == text
    assert len(whole) > 10


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": " \\n"}\n{"text": ""}\n{"text": "b"}\n')
    assert read(path, "jsonl") == ["a", "b"]


def test_jsonl_plain_and_compressed(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"body": f"text {number} ☃"}) + "\n" for number in range(20))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    # As shards are published: several frames, one after another.
    half = lines.encode().index(b"\n") + 1
    (tmp_path / "a.jsonl.zst").write_bytes(
        zstd(lines.encode()[:half]) + zstd(lines.encode()[half:])
    )
    expected = [f"text {number} ☃" for number in range(20)]
    assert read(tmp_path / "a.jsonl", "jsonl", "body") == expected
    assert read(tmp_path / "a.jsonl.gz", "jsonl", "body") == expected
    assert read(tmp_path / "a.jsonl.zst", "jsonl", "body") == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ', "the JSON object does not end on its line; write each object on one line"),
        (b'{"text" "a"}', "not valid JSON"),
        (b'{"text": "\xff"}', "not UTF-8 text \\(invalid start byte\\); convert the file to UTF-8"),
        ('{"text": "a"}'.encode("utf-16"), "not UTF-8 but UTF-16 text; convert the file to UTF-8"),
        (gzip.compress(b"{}", mtime=0), "compressed by gzip; give the name of the file"),
        (b'{"text": "a", "text": "b"}', 'key "text" is there twice in one object; remove one of'),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"text": 3}', 'field "text" is not text'),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: {reason}") as caught:
        read(path, "jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zstd)])
def test_broken_packed_file_is_named(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(pack(b'{"text": "a"}\n' * 1000)[:-8])
    with pytest.raises(DataError, match=rf"a\.jsonl\.{ending}: cannot be read"):
        read(path, "jsonl")
    path.write_bytes(b'{"text": "a"}\n')  # not packed at all
    with pytest.raises(DataError, match=rf"a\.jsonl\.{ending}: cannot be read"):
        read(path, "jsonl")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["one", None, "two", "  "] * 400
    table = pa.table({"id": list(range(1600)), "body": pa.array(texts, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert read(tmp_path / "a.parquet", "parquet", "body") == ["one", "two"] * 400


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "n": [2]}), path)
    with pytest.raises(DataError, match=r'a\.parquet: no column "text" \(columns: id, n\); set'):
        read(path, "parquet")
    with pytest.raises(DataError, match=r'column "id" holds int64, not text'):
        read(path, "parquet", "id")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        read(path, "parquet", "id")
    with pytest.raises(DataError, match=r"b\.parquet: not a readable Parquet file"):
        read(tmp_path / "b.parquet", "parquet")


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert read(path, "jsonl") == ["a\ufffdb 😀"]


@pytest.mark.parametrize("kind", ["jsonl", "array", "parquet"])
def test_records_without_text_are_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    """One rule for all formats, wherever in the file they are."""
    texts, counted = ["one", None, "two", None, "three"], []
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.jsonl")
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        records = [{"text": text} for text in texts[:3]] + [{"id": 4}, {"text": "three"}]
        lines = [json.dumps(record) for record in records]
        path.write_text(f"[{','.join(lines)}]" if kind == "array" else "\n".join(lines))
    read = read_documents(path, path.suffix[1:], "text", lambda: counted.append(1))
    assert list(read) == ["one", "two", "three"]
    assert len(counted) == 2


def test_a_file_none_of_whose_records_has_the_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": "a", "id": 1}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r'a\.jsonl:1: no field "text" \(fields: id, txt\); set'):
        read(tmp_path / "a.jsonl", "jsonl")


def test_what_holds_no_text_is_called_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for value, kind in (("[1]", "a list"), ("{}", "an object"), ("true", "true or false")):
        path.write_text(f'{{"messages": {value}}}')
        with pytest.raises(DataError, match=f'field "messages" is not text but {kind}; set data'):
            read(path, "jsonl", "messages")
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    with pytest.raises(
        DataError,
        match=r'a list; .*; for chats, set data\.format = "chat" and data\.messages_field',
    ):
        read(path, "jsonl", "messages")


def test_kinds_of_parquet_columns(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.parquet", ["eins", None, "grüße", "eins"]
    kept = [text for text in texts if text]
    coded = [text.encode() if text else None for text in texts]
    for column in (
        pa.array(texts).dictionary_encode(), pa.array(coded), pa.array(coded, pa.large_binary()),
    ):  # fmt: skip
        pq.write_table(pa.table({"text": column}), path)
        assert read(path, "parquet") == kept
    pq.write_table(pa.table({"text": pa.nulls(3)}), path)
    assert read(path, "parquet") == []
    pq.write_table(pa.table({"text": pa.array([b"good", b"\xff"])}), path)
    with pytest.raises(DataError, match=r'column "text", row 2: not UTF-8 text'):
        read(path, "parquet")
    pq.write_table(pa.table([pa.array(kept), pa.array(kept)], ["text", "text"]), path)
    with pytest.raises(DataError, match=r'a\.parquet: 2 columns are named "text"; rename'):
        read(path, "parquet")


def test_a_long_window_of_zstd_names_its_mend(tmp_path: Path) -> None:
    path = tmp_path / "a b.jsonl.zst"
    # The header of a frame that asks for a window of 256 MiB (RFC 8878, 3.1.1).
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes([0, (28 - 10) << 3]) + b"\x01\x00\x00")
    with pytest.raises(DataError, match=r"decompress it: zstd -d --long=31 'a b\.jsonl\.zst'"):
        read(path, "jsonl")


@SETTINGS
@given(st.text(st.characters(codec=None, categories=("L", "N", "Cs", "So"))))
def test_clean_text_always_encodes(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode()
    if not any(unicodedata.category(character) == "Cs" for character in text):
        assert cleaned == text


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl"])
def test_json_arrays_are_read_record_by_record(
    tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK", block)
    texts = [f'é [{number}] {{"}}, ]' for number in range(20)]
    text = json.dumps([{"body": text} for text in texts], indent=1, ensure_ascii=False)
    raw = b"\xef\xbb\xbf\n " + text.encode() + b" \n"
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert read(tmp_path / name, "jsonl", "body") == texts
    (tmp_path / "empty.json").write_text("[ ]\n")
    assert read(tmp_path / "empty.json", "jsonl") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"text": "a"}, {"text": ', "record 2: not valid JSON"),
        ('[{"text": "a"}', "record 2: not valid JSON"),
        ('[{"text": "a"} {"text": "b"}]', "record 2: not valid JSON"),
        ('[{"text": "a"}, ]', "record 2: not valid JSON"),
        ('[{"text": "a"}] x', "record 2: not valid JSON"),
        ('[{"text": "a"}, 3]', "record 2: not a JSON object"),
        (
            '[{"id": 3}, {"no": 3}]',
            r'record 1: no field "text" \(fields: id\); set data.text_field',
        ),
        ('[{"text": 3}]', 'record 1: field "text" is not text'),
    ],
)
def test_bad_record_of_an_array_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=rf"a\.json:{reason}") as caught:
        read(tmp_path / "a.json", "jsonl")
    assert "\n" not in str(caught.value)


def test_compressed_text(tmp_path: Path) -> None:
    text = "\ufeffgrüße\r\n\r\nzwei\n"
    for name in ("a.txt.gz", "b.TXT.GZ", "c.txt.zst", "d.TXT.ZST"):
        pack = gzip.compress if name.lower().endswith(".gz") else zstd
        (tmp_path / name).write_bytes(pack(text.encode()))
        assert read(tmp_path / name, "text") == ["grüße\r\n\r\nzwei\n"]
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode() * 1000)[:-20])
    with pytest.raises(DataError, match=r"c\.txt\.gz: cannot be read"):
        read(tmp_path / "c.txt.gz", "text")
