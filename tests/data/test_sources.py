from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dilocox.data import prepare, show
from dilocox.data.hub import HubSource, on_hub
from dilocox.data.manifest import MANIFEST, render
from dilocox.data.sources import STDLIB, find_files, list_files, read_source
from dilocox.errors import DataError
from tests.data.chats import talks, write_records
from tests.data.conftest import section, story, write_corpus


def quiet(step: str, share: float) -> None:
    """Progress that nobody looks at."""


STORIES = [story(number) for number in range(40)]


def write_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    return path


def write_parquet(path: Path) -> Path:
    pq.write_table(pa.table({"text": STORIES}), path)
    return path


def test_every_format_gives_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "code").mkdir()
    for number, text in enumerate(STORIES):
        (tmp_path / "text" / f"{number:02d}.txt").write_text(text)
        (tmp_path / "code" / f"{number:02d}.py").write_text(text)
    sources = [
        tmp_path / "text",
        tmp_path / "code",
        write_jsonl(tmp_path / "a.jsonl"),
        write_parquet(tmp_path / "a.parquet"),
    ]
    shards = set()
    for number, source in enumerate(sources):
        files = prepare(section(source), tmp_path / f"data{number}", seed=0)
        assert files.document_count("train") + files.document_count("validation") == 40
        shards.add(files.content["splits"]["train"]["shards"][0]["sha256"])
    assert len(shards) == 1


def test_several_sources_in_the_order_given(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl")
    write_corpus(tmp_path / "a", documents=3)
    names = [str(tmp_path / "b.jsonl"), str(tmp_path / "a")]
    files = prepare(section(names), tmp_path / "data", seed=0)
    entries = files.content["sources"]
    assert [len(entry["files"]) for entry in entries] == [1, 3]
    back = prepare(section(names[::-1]), tmp_path / "back", seed=0)
    assert back.digest != files.digest


def test_manifest_names_every_file_with_its_digest(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents=5)
    source = read_source(str(corpus), section(corpus, licence="CC0-1.0", revision="v1"), quiet)
    entry = source.describe()
    assert (entry["kind"], entry["licence"], entry["revision"]) == ("files", "CC0-1.0", "v1")
    assert [file["name"] for file in entry["files"]] == [
        "part0/000.txt",
        "part0/003.txt",
        "part1/001.txt",
        "part1/004.txt",
        "part2/002.txt",
    ]
    for file in entry["files"]:
        raw = (corpus / file["name"]).read_bytes()
        assert file["bytes"] == len(raw)
        assert file["sha256"] == hashlib.sha256(raw).hexdigest()


def test_folder_takes_text_and_leaves_the_rest(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "c.py", "d.jsonl", "e.parquet", "x.bin", "y.png", ".h.txt"):
        (tmp_path / name).write_text("{}")
    for folder in (".git", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f.py").write_text("x")

    def names(**change: Any) -> list[str]:
        return [file.name for file in list_files(str(tmp_path), section(tmp_path, **change))]

    assert names() == ["a.md", "b.txt", "c.py", "d.jsonl", "e.parquet"]
    assert names(format="code") == ["c.py"]
    assert names(format="text") == ["a.md", "b.txt"]


def test_named_file_is_taken_whatever_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("x")
    assert list_files(str(path), section(path))[0].format == "text"
    assert list_files(str(path), section(path, format="jsonl"))[0].format == "jsonl"


def test_files_that_are_not_text_are_skipped_and_counted(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    (corpus / "latin.txt").write_bytes("é".encode("latin-1"))
    (corpus / "cut.txt").write_bytes("aé".encode()[:-1])
    (corpus / "nul.txt").write_bytes(b"a\0b")
    files = prepare(section(corpus), tmp_path / "data", seed=0)
    assert files.content["sources"][0]["skipped_files"] == 3
    assert len(files.content["sources"][0]["files"]) == 40
    assert prepare(section(corpus), tmp_path / "data", seed=0).digest == files.digest
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8 text; convert it"):
        read_source(str(corpus / "latin.txt"), section(corpus), quiet)


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: no such file or folder; for a hub dataset set"):
        list_files(str(tmp_path / "none"), section(tmp_path))
    with pytest.raises(
        DataError, match=r"no file with text in this folder; endings that are read: .*\.txt"
    ):
        list_files(str(tmp_path), section(tmp_path))
    with pytest.raises(DataError, match=r"data\.source: missing; name files or folders"):
        prepare(section(None), tmp_path / "data", seed=0)


def test_json_files_hold_records_not_text(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "lines.jsonl")
    files = [prepare(section(lines), tmp_path / "0", seed=0)]
    lines.rename(tmp_path / "lines.json")
    (tmp_path / "array.json").write_text(json.dumps([{"text": text} for text in STORIES]))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress((tmp_path / "array.json").read_bytes()))
    for number, name in enumerate(("lines.json", "array.json", "a.json.gz"), start=1):
        files.append(prepare(section(tmp_path / name), tmp_path / f"data{number}", seed=0))
    assert len({each.content["splits"]["train"]["shards"][0]["sha256"] for each in files}) == 1


def test_json_in_a_folder_is_counted_and_read_when_asked_for(tmp_path: Path) -> None:
    """A folder of code has package.json and the like: records are not taken for granted."""
    corpus = write_corpus(tmp_path / "corpus")
    (corpus / "more.json").write_text('{"text": "more"}\n')
    source = read_source(str(corpus), section(corpus), quiet)
    assert dict(source.left_out) == {'.json (data.format = "jsonl" reads them)': 1}
    found = list_files(str(corpus), section(corpus, format="jsonl"))
    assert [(file.name, file.format) for file in found] == [("more.json", "jsonl")]
    only = tmp_path / "only"
    only.mkdir()
    (only / "a.json").write_text('{"text": "more"}\n')
    with pytest.raises(DataError, match=r"left out: 1 \.json \(data\.format = .jsonl. reads them"):
        list_files(str(only), section(only))


def test_every_file_that_is_left_out_is_counted_with_its_reason(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    (corpus / "packed.txt.gz").write_bytes(gzip.compress(b"in a packed file\n"))
    (corpus / "packed.bad.txt.gz").write_bytes(gzip.compress("é".encode("latin-1")))
    (corpus / "latin.txt").write_bytes("é".encode("latin-1"))
    for name in ("a.pdf", "b.PDF", "c.jsonl.xz", "LICENCE", ".hidden.txt"):
        (corpus / name).write_text("x")
    (corpus / ".git").mkdir()
    (corpus / ".git" / "a.txt").write_text("x")
    (corpus / "gone.txt").symlink_to(corpus / "nowhere")
    source = read_source(str(corpus), section(corpus), quiet)
    assert dict(source.left_out) == {
        ".pdf": 2,
        ".jsonl.xz": 1,
        "without an ending": 1,
        "hidden": 2,
        "links to nothing": 1,
    }
    assert source.skipped == 2
    assert "in a packed file\n" in list(source.documents())
    files = prepare(section(corpus), tmp_path / "data", seed=0)
    text = show(files)
    assert "2 files skipped (not UTF-8 text)" in text
    for part in ("2 .pdf", "1 .jsonl.xz", "1 without an ending", "2 hidden", "1 links to nothing"):
        assert part in text
    assert files.left_out == 2 + 5  # hidden ones apart
    # They are this machine's matter: the same text has the same digest without them.
    for name in ("a.pdf", "b.PDF", "c.jsonl.xz", "LICENCE", "gone.txt"):
        (corpus / name).unlink()
    assert prepare(section(corpus), tmp_path / "again", seed=0).digest == files.digest


def test_many_different_endings_are_summed_up(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for number in range(40):
        (tmp_path / f"b.{number}").write_text("x")
    left = read_source(str(tmp_path), section(tmp_path), quiet).left_out
    assert sum(left.values()) == 40
    assert len(left) < 20


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents=3)
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "far.txt").write_text("far away")
    (corpus / "a-link").symlink_to(other)
    (corpus / "b-link").symlink_to(other)  # the same once more
    (corpus / "c-link").symlink_to(corpus / "part0")  # read already
    (other / "back").symlink_to(corpus)  # a loop
    (other / "up").symlink_to(tmp_path)  # a folder that holds this one
    source = read_source(str(corpus), section(corpus), quiet)
    names = [file.name for file in source.files]
    assert names == ["a-link/deep/far.txt", "part0/000.txt", "part1/001.txt", "part2/002.txt"]
    assert dict(source.left_out) == {"links to folders that are read already": 4}
    # Told apart by what they are, not by how they are reached.
    (tmp_path / "way").symlink_to(corpus)
    again = read_source(str(tmp_path / "way"), section(corpus), quiet)
    assert [file.name for file in again.files] == names


def test_a_folder_without_utf8_says_so(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"none of its 3 files is UTF-8 text; convert them"):
        read_source(str(tmp_path), section(tmp_path), quiet)


def test_packed_files_that_cannot_be_read_are_refused_when_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(b"\xfd7zXZ\x00")
    with pytest.raises(
        DataError, match=r"a\.jsonl\.xz: \.xz files cannot be decompressed here; .*\.gz"
    ):
        list_files(str(path), section(path))


def test_token_files_of_before_are_not_called_changed(tmp_path: Path) -> None:
    """An earlier version passed over what is taken now, and wrote down nothing of it."""
    corpus = write_corpus(tmp_path / "corpus")
    old = prepare(section(corpus), tmp_path / "data", seed=0)
    made_with = {k: v for k, v in old.manifest["made_with"].items() if k != "left_out"}
    (old.folder / MANIFEST).write_text(render(old.content, made_with))
    (corpus / "packed.txt.gz").write_bytes(gzip.compress(b"x"))
    again = prepare(section(corpus), tmp_path / "data", seed=0)
    assert again.digest == old.digest
    assert again.left_out == 0
    (corpus / "part0" / "000.txt").write_text("less")
    with pytest.raises(DataError, match="has changed since"):
        prepare(section(corpus), tmp_path / "data", seed=0)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a patched `open`, since root may read everything."""
    corpus = write_corpus(tmp_path / "corpus")
    plain_open = Path.open

    def guarded(self: Path, *given: Any, **options: Any) -> Any:
        if self.name == "003.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return plain_open(self, *given, **options)

    monkeypatch.setattr(Path, "open", guarded)
    with pytest.raises(DataError, match=r"003\.txt: cannot be read \(Permission denied\)"):
        read_source(str(corpus), section(corpus), quiet)


def test_standard_library() -> None:
    source = read_source(STDLIB, section(STDLIB), quiet)
    names = [file.name for file in source.files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/test" in f"/{name}"]
    assert not [name for name in names if name.startswith("_sysconfigdata")]
    assert source.size > 8_000_000
    assert source.licence == "PSF-2.0"
    assert source.revision == f"CPython {platform.python_version()}"
    first = next(source.documents())
    assert first == source.files[0].path.read_text(encoding="utf-8")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


@pytest.mark.usefixtures("hub_cache")
def test_dataset_folder_through_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl")
    data = section(folder, format="hub", licence="MIT")
    files = prepare(data, tmp_path / "data", seed=0)
    plain = prepare(section(folder / "train.jsonl"), tmp_path / "plain", seed=0)
    for split in ("train", "validation"):
        assert files.content["splits"][split] == plain.content["splits"][split]
    raw = [text.encode() for text in STORIES]
    digest = hashlib.sha256(b"".join(len(r).to_bytes(8, "little") + r for r in raw)).hexdigest()
    assert files.content["sources"] == [
        {
            "kind": "hub",
            "name": None,
            "subset": None,
            "split": "train",
            "licence": "MIT",
            "revision": None,
            "documents": {"count": 40, "bytes": sum(map(len, raw)), "sha256": digest},
        }
    ]
    assert prepare(data, tmp_path / "data", seed=0).digest == files.digest
    few = prepare(section(folder, format="hub", max_documents=30), tmp_path / "few", seed=0)
    assert few.content["sources"][0]["documents"]["count"] == 30
    with pytest.raises(DataError, match=r'no column "body" \(columns: text\); set data.text_field'):
        HubSource(str(folder), section(folder, format="hub", text_field="body"))
    with pytest.raises(DataError, match=r"cannot be loaded \(.*\); check name, subset, split"):
        HubSource(str(folder), section(folder, format="hub", split="nope"))


@pytest.mark.usefixtures("hub_cache")
def test_hub_name_is_resolved_to_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    class Api:
        def dataset_info(self, name: str, revision: str | None) -> SimpleNamespace:
            assert (name, revision) == ("team/words", "v1")
            return SimpleNamespace(sha="c0ffee", card_data={"license": ["mit", "cc0-1.0"]})

    asked: list[Any] = []

    def load(*given: Any, **options: Any) -> Any:
        asked.append((given, options))
        rows = [{"text": text} for text in ("one", None, " ", "two")]
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load)
    data = section("team/words", format="hub", subset="en", split="test", revision="v1")
    source = HubSource("team/words", data)
    assert asked == [
        (("team/words", "en"), {"split": "test", "revision": "c0ffee", "streaming": True})
    ]
    assert list(source.documents()) == ["one", "two"]
    entry = source.describe()
    assert (entry["name"], entry["revision"]) == ("team/words", "c0ffee")
    assert entry["licence"] == "mit, cc0-1.0"
    assert entry["documents"]["count"] == 2
    assert list(source.documents()) == ["one", "two"]
    assert source.describe() == entry


@pytest.mark.usefixtures("hub_cache")
def test_hub_rows_that_break_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows() -> Any:
        yield {"text": "one"}
        raise ConnectionError("reset by peer")

    made = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: made)
    source = HubSource(str(tmp_path), section(tmp_path, format="hub"))
    with pytest.raises(DataError, match=r"reading stopped at row 1 \(.*\); try again"):
        list(source.documents())
    made = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}, {"text": 3}]))
    source = HubSource(str(tmp_path), section(tmp_path, format="hub"))
    with pytest.raises(DataError, match=r'column "text" of row 1 holds int, not text'):
        list(source.documents())


def test_hub_without_datasets_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="run: pip install datasets"):
        HubSource("team/words", section("team/words", format="hub"))


def test_conversations_in_a_folder(tmp_path: Path) -> None:
    """JSON and Parquet files are read, and text files are left out and counted."""
    write_records(tmp_path / "a.jsonl", talks(3))
    (tmp_path / "b.json").write_text(json.dumps(talks(2)))
    pq.write_table(pa.Table.from_pylist(talks(4)), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text("text")
    source = read_source(str(tmp_path), section(tmp_path, format="instruction"), quiet)
    assert [file.name for file in source.files] == ["a.jsonl", "b.json", "c.parquet"]
    assert source.left_out == {".txt": 1}
    data = section(tmp_path, format="chat", tokenizer="team/tiny")
    source = read_source(str(tmp_path), data, quiet)
    documents = [json.loads(each) for each in source.documents()]
    assert documents == [*talks(3), *talks(2), *talks(4)]
    write_records(tmp_path / "talks", talks(3))  # a file without an ending
    found = read_source(str(tmp_path / "talks"), data, quiet)
    assert len(list(found.documents())) == 3


@pytest.mark.usefixtures("hub_cache")
def test_conversations_of_a_hub_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    table = pa.Table.from_pylist([*talks(5), {"messages": None}])
    pq.write_table(table, folder / "a.parquet")
    data = section(folder, format="chat", tokenizer="team/tiny")
    source = HubSource(str(folder), data)
    assert [json.loads(each) for each in source.documents()] == talks(5)
    assert source.without_text == 1
    with pytest.raises(DataError, match=r'no column "talk" .*; set data.messages_field'):
        HubSource(str(folder), data.model_copy(update={"messages_field": "talk"}))
    table = pa.Table.from_pylist([{"messages": [{"role": "bot", "content": "a"}]}])
    pq.write_table(table, folder / "a.parquet")
    with pytest.raises(DataError, match=r'data.source .*: row 0: message 1: role "bot"'):
        list(HubSource(str(folder), data).documents())


@pytest.mark.usefixtures("hub_cache")
def test_hub_datasets_add_no_arguments_to_calls(tmp_path: Path) -> None:
    """And dates are text, as in JSON."""
    calls = [("weather", {"city": "Paris"}), ("clock", {"zone": "UTC"})]
    records: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "a", "sent": datetime.date(2024, 7, 26)},
                {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]},
            ],
            "tools": [{"name": name, "parameters": {key: {"type": "string"} for key in arguments}}],
        }
        for name, arguments in calls
    ]
    folder = tmp_path / "talks"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet")
    data = section(folder, format="chat", tokenizer="team/tiny")
    for record in records:
        record["messages"][0]["sent"] = "2024-07-26"
    found = HubSource(str(folder), data).documents()
    assert [json.loads(each) for each in found] == records


def test_which_names_are_those_of_hub_datasets(tmp_path: Path) -> None:
    data = section(tmp_path, format="chat", tokenizer="team/tiny")
    names = ["team/talks", "talks.jsonl", "team/talks.jsonl", "./talks", "a/b/c", str(tmp_path)]
    assert [on_hub(name, data) for name in names] == [True, *[False] * 5]
    assert on_hub("anything", section(tmp_path, format="hub"))
    assert not on_hub("team/talks", section(tmp_path))


def test_csv_files_are_records_if_they_are_named_or_asked_for(tmp_path: Path) -> None:
    for name in ("a.csv", "b.tsv.gz", "c.jsonl", "d.txt"):
        (tmp_path / name).write_text("prompt,completion\na,b\n")

    def formats(**keys: str) -> dict[str, str]:
        found = list_files(str(tmp_path), section(tmp_path, **keys))
        return {each.name: each.format for each in found}

    assert formats() == {"c.jsonl": "jsonl", "d.txt": "text"}
    assert formats(format="csv") == {"a.csv": "csv", "b.tsv.gz": "csv"}
    # Beside other records, tables are seldom conversations, or hold the same ones.
    assert formats(format="instruction") == {"c.jsonl": "jsonl"}
    _, left = find_files(str(tmp_path), section(tmp_path))
    assert left == {
        '.csv (data.format = "csv" reads them)': 1,
        '.tsv.gz (data.format = "csv" reads them)': 1,
    }
    (tmp_path / "c.jsonl").unlink()
    assert formats(format="instruction") == {"a.csv": "csv", "b.tsv.gz": "csv"}
    for asked, expected in (("auto", "csv"), ("text", "text"), ("instruction", "csv")):
        named = section(tmp_path, format=asked)
        assert [each.format for each in list_files(str(tmp_path / "a.csv"), named)] == [expected]


def test_tables_and_folders_of_datasets_are_no_records(tmp_path: Path) -> None:
    table = tmp_path / "a.xlsx"
    table.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"a\.xlsx: \.xlsx files are not read; convert the file to"):
        list_files(str(table), section(table, format="instruction"))
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{\n}")
    (folder / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(DataError, match="is a folder of save_to_disk of datasets, which is not"):
        list_files(str(folder), section(folder, format="jsonl"))
