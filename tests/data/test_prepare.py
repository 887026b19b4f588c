from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from dilocox.config.data import DataSection
from dilocox.data import (
    SequenceSpace,
    TokenFiles,
    document_encoding,
    folder,
    group_documents,
    packing,
    prepare,
    show,
    source_groups,
    tokenizer,
)
from dilocox.data.sources import read_source
from dilocox.errors import DataError
from tests.data.conftest import section, story, write_corpus
from tests.support.dying import die

prepare_module = sys.modules["dilocox.data.prepare"]  # The name is the function's, too.


def texts(files: TokenFiles, split: str) -> list[str]:
    """The documents of a split, decoded from its tokens."""
    tokens = np.concatenate(
        [
            np.fromfile(files.folder / shard["file"], dtype=files.dtype)
            for shard in files.content["splits"][split]["shards"]
        ]
    )
    decoder = Tokenizer.from_file(str(files.tokenizer_folder / "tokenizer.json"))
    ends = np.flatnonzero(tokens == files.end_of_text)
    assert ends[-1] == len(tokens) - 1
    starts = [0, *(ends[:-1] + 1).tolist()]
    return [
        decoder.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        for start, end in zip(starts, ends.tolist(), strict=True)
    ]


def test_documents_come_back_in_order_and_split_whole(files: TokenFiles, corpus: Path) -> None:
    expected = [path.read_text() for path in sorted(corpus.rglob("*.txt"))]
    train, validation = texts(files, "train"), texts(files, "validation")
    assert train == [text for text in expected if text in set(train)]
    assert Counter(train + validation) == Counter(expected)
    assert validation


def test_same_corpus_in_another_place_has_the_same_digest(
    files: TokenFiles, corpus: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(corpus, tmp_path / "elsewhere")
    again = prepare(section(moved), tmp_path / "deep" / "er" / "data", seed=0)
    assert again.digest == files.digest
    assert again.folder == tmp_path / "deep" / "er" / "data"


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary_size": 310},
        {"validation_fraction": 0.3},
        {"max_documents": 39},
        {"licence": "CC0-1.0"},
        {"revision": "v2"},
    ],
)
def test_other_options_have_another_digest(
    files: TokenFiles, corpus: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    assert prepare(section(corpus, **change), tmp_path / "data", seed=0).digest != files.digest


def test_seed_moves_the_split(files: TokenFiles, corpus: Path, tmp_path: Path) -> None:
    other = prepare(section(corpus), tmp_path / "data", seed=1)
    assert set(texts(other, "validation")) != set(texts(files, "validation"))


def test_split_follows_the_text_not_its_place(tmp_path: Path) -> None:
    """Renamed, reordered and with copies: the same texts are held out, copies on one side."""
    write_corpus(tmp_path / "one")
    (tmp_path / "two").mkdir()
    for number in range(40):
        (tmp_path / "two" / f"{99 - number}.txt").write_text(story(number))
        (tmp_path / "two" / f"{99 - number} copy.txt").write_text(story(number))
    one = prepare(section(tmp_path / "one"), tmp_path / "a", seed=0)
    two = prepare(section(tmp_path / "two"), tmp_path / "b", seed=0)
    held = set(texts(one, "validation"))
    assert set(texts(two, "validation")) == held
    assert not held & set(texts(two, "train"))
    assert Counter(texts(two, "validation")) == Counter([*held, *held])


def test_share_held_out_is_about_the_fraction(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": story(number, 20)}) + "\n" for number in range(3000))
    (tmp_path / "a.jsonl").write_text(lines)
    files = prepare(section(tmp_path / "a.jsonl"), tmp_path / "data", seed=0)
    assert 240 < files.document_count("validation") < 360  # 300 expected, deviation 16


def test_second_call_reuses(corpus: Path, tmp_path: Path) -> None:
    target = tmp_path / "data"
    first = prepare(section(corpus), target, seed=0)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    second = prepare(section(corpus, sequence_length=8, validation_sequences=2), target, seed=0)
    assert second.digest == first.digest
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before


def test_reuse_refuses_a_cut_file(copy: TokenFiles, corpus: Path) -> None:
    path = copy.folder / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="bytes instead of"):
        prepare(section(corpus), copy.folder, seed=0)


@pytest.mark.parametrize(
    ("change", "seed", "reason"),
    [
        ({"vocabulary_size": 310}, 0, "vocabulary_size 300 instead of 310"),
        ({}, 3, "seed 0 instead of 3"),
    ],
)
def test_other_options_in_the_folder_are_refused(
    copy: TokenFiles, corpus: Path, change: dict[str, Any], seed: int, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"{reason}\); set data.folder to another .* or delete"):
        prepare(section(corpus, **change), copy.folder, seed=seed)


def test_changed_corpus_is_refused_and_a_missing_one_is_not(tmp_path: Path) -> None:
    corpus, target = write_corpus(tmp_path / "corpus"), tmp_path / "data"
    digest = prepare(section(corpus), target, seed=0).digest
    (corpus / "new.txt").write_text("more")
    with pytest.raises(DataError, match=r"has changed since .* \(\+1 files\); set data.folder"):
        prepare(section(corpus), target, seed=0)
    (corpus / "new.txt").unlink()
    (corpus / "part0" / "000.txt").write_text("less")
    with pytest.raises(DataError, match=r"has changed since .* \(part0/000.txt\)"):
        prepare(section(corpus), target, seed=0)
    shutil.rmtree(corpus)
    assert prepare(section(corpus), target, seed=0).digest == digest


def test_foreign_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(DataError, match=r"not empty and without token files; set data\.folder"):
        prepare(section(corpus), tmp_path, seed=0)
    with pytest.raises(DataError, match=r"is a file; set data\.folder"):
        prepare(section(corpus), tmp_path / "mine.txt", seed=0)
    assert (tmp_path / "mine.txt").read_text() == "x"


def test_tiny_corpus_still_holds_something_out(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", documents=2)
    for seed in range(6):
        data = section(tmp_path / "corpus", validation_fraction=0.5, vocabulary_size=260)
        files = prepare(data, tmp_path / f"data{seed}", seed=seed)
        assert files.document_count("train") == files.document_count("validation") == 1
        assert texts(files, "train") != texts(files, "validation")


@pytest.mark.parametrize(
    ("content", "change", "reason"),
    [
        ("", {}, "no text in the sources"),
        (" \n\n", {}, "no text in the sources"),
        ("only one", {}, "one document is not enough, since some documents must be held out; give"),
    ],
)
def test_too_little_text(tmp_path: Path, content: str, change: dict[str, Any], reason: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(DataError, match=f"data.source: {reason}"):
        prepare(section(tmp_path / "a.txt", **change), tmp_path / "data", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_corpus_too_small_for_the_vocabulary_or_a_sequence(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data.vocabulary_size 50000: the text yields only \d+ tokens"
    ):
        prepare(section(corpus, vocabulary_size=50_000), tmp_path / "data", seed=0)
    with pytest.raises(DataError, match=r"validation split has .* sequence_length 2000 needs 2001"):
        prepare(section(corpus, sequence_length=2000), tmp_path / "data", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_bad_line_is_named_through_the_trainer_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: the JSON object does not end on its line"):
        prepare(section(tmp_path / "a.jsonl"), tmp_path / "data", seed=0)


def test_files_that_change_while_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    train = tokenizer.train_tokenizer

    def meddle(*given: Any) -> Any:
        encoder = train(*given)
        (corpus / "part0" / "000.txt").write_text("other")
        return encoder

    monkeypatch.setattr(prepare_module, "train_tokenizer", meddle)
    with pytest.raises(DataError, match=r"000\.txt: changed while it was read"):
        prepare(section(corpus), tmp_path / "data", seed=0)


def test_many_shards_hold_the_same_tokens(
    files: TokenFiles, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_encoding, "SHARD_BYTES", 1000)
    monkeypatch.setattr(group_documents, "BATCH_CHARACTERS", 2000)
    cut = prepare(section(corpus), tmp_path / "data", seed=0)
    assert len(cut.content["splits"]["train"]["shards"]) > 5
    cut.verify()
    assert texts(cut, "train") == texts(files, "train")
    space = SequenceSpace(cut, seed=0, sequence_length=16)
    flat = np.concatenate(
        [np.fromfile(path, dtype="<u2") for path in sorted(cut.folder.glob("train-*.bin"))]
    )
    rows = space.read(0, space.sequences_per_epoch)
    for row, position in zip(rows, space.positions(0, len(rows)), strict=True):
        assert np.array_equal(row, flat[position * 16 : position * 16 + 17])


def test_tokenizer_of_a_big_corpus_is_trained_on_a_sample(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 8000)
    monkeypatch.setattr(group_documents, "BATCH_CHARACTERS", 500)
    files = prepare(section(corpus, vocabulary_size=270), tmp_path / "data", seed=0)
    sample = files.content["tokenizer"]["sample"]
    assert 2000 < sample["bytes"] < 9000
    assert 2 < sample["documents"] < 20
    assert files.document_count("train") + files.document_count("validation") == 40


def test_a_tokenizer_is_trained_on_what_is_read_of_a_big_corpus(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the share of it that the bytes of the whole corpus would leave."""
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 10_000)
    data = section(corpus, max_documents=10, vocabulary_size=270)
    files = prepare(data, tmp_path / "data", seed=0)
    train = files.content["splits"]["train"]
    assert files.document_count("train") + files.document_count("validation") == 10
    sample = files.content["tokenizer"]["sample"]
    assert sample == {"bytes": train["bytes"], "documents": train["documents"]}


def test_the_disk_has_to_hold_what_is_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in corpus.rglob("*.txt"))
    usage = shutil.disk_usage(tmp_path)._replace(free=size // 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 10_000)
    few = section(corpus, max_documents=10, vocabulary_size=270)
    prepare(few, tmp_path / "data", seed=0)
    for many in (section(corpus), section(corpus, max_documents=39)):
        with pytest.raises(DataError, match="are free; make room"):
            prepare(many, tmp_path / "other", seed=0)


def test_progress_goes_from_reading_to_done(corpus: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    prepare(section(corpus), tmp_path / "data", 0, lambda step, share: seen.append((step, share)))
    assert list(dict.fromkeys(step for step, _ in seen)) == [
        "reading sources",
        "training the tokenizer",
        "encoding",
    ]
    assert all(0 <= share <= 1 for _, share in seen)
    assert seen[-1] == ("encoding", 1.0)


def _prepare_and_die(data: DataSection, target: Path) -> None:
    """Die as by SIGKILL in the middle of the first shard."""

    def write_half(self: packing.Packer, part: np.ndarray) -> None:
        assert self._tokens is not None
        self._tokens.write(part[: len(part) // 2])
        die()

    packing.Packer._write = write_half  # type: ignore[method-assign]
    prepare(data, target, 0)


def test_killed_halfway_leaves_nothing_to_open_and_is_swept(tmp_path: Path) -> None:
    corpus, target = write_corpus(tmp_path / "corpus"), tmp_path / "data"
    process = multiprocessing.get_context("fork").Process(
        target=_prepare_and_die, args=(section(corpus), target)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path != corpus]
    assert len(left) == 1
    assert list(left[0].glob("train-*.bin"))
    for path in (target, left[0]):
        with pytest.raises(DataError, match="no token files here"):
            TokenFiles.open(path)
    prepare(section(corpus), target, seed=0).verify()
    assert sorted(tmp_path.iterdir()) == [corpus, target]


def test_partial_folder_of_a_living_process_is_kept(corpus: Path, tmp_path: Path) -> None:
    with folder.partial_folder(tmp_path / "data") as mine:
        other = mine.with_name(mine.name.rsplit("-", 1)[0] + f"-{os.getppid()}")
        foreign = mine.with_name(".data.partial-other-machine-1")
        other.mkdir()
        foreign.mkdir()
    assert not mine.exists()
    prepare(section(corpus), tmp_path / "data", seed=0)
    assert other.exists()
    assert foreign.exists()


def test_loser_of_a_race_takes_the_winners_files(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "data"
    train = tokenizer.train_tokenizer

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(prepare_module, "train_tokenizer", train)
        partial = target.parent / "winner"
        prepare(section(corpus), partial, seed=0)
        partial.rename(target)
        return train(*given)

    monkeypatch.setattr(prepare_module, "train_tokenizer", overtaken)
    files = prepare(section(corpus), target, seed=0)
    files.verify()
    assert list(tmp_path.iterdir()) == [target]


def test_full_disk_is_said_at_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"need [\d.]+ kB or more, but only 100 B are free; make"):
        prepare(section(corpus), tmp_path / "data", seed=0)


def test_unwritable_place_is_one_line(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"token files cannot be written .*; name another folder"):
        prepare(section(corpus), tmp_path / "file" / "data", seed=0)


def test_a_run_that_has_begun_needs_its_token_files_and_not_their_source(tmp_path: Path) -> None:
    source, tokens, said = tmp_path / "text", tmp_path / "tokens", list[str]()
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text(story(number))
    data = section(source)
    made = prepare(data, tokens, 0)
    assert prepare(data, tokens, 0, changed=said.append).digest == made.digest
    assert said == []
    (source / "later.txt").write_text("one more that came later")
    with pytest.raises(DataError, match="has changed since"):
        prepare(data, tokens, 0)
    assert prepare(data, tokens, 0, changed=said.append).digest == made.digest
    (line,) = said
    assert line.startswith(f"data.source {source} has changed since the token files in {tokens}")
    assert line.endswith("(+1 files); the run goes on with the token files that it began with")


def test_records_without_text_are_shown(tmp_path: Path) -> None:
    """A null among many, as dumps have: not refused, and not passed over in silence."""
    records = [{"text": f"line number {number} of the text " * 9} for number in range(70)]
    lines = [json.dumps(record) for record in [*records, {"text": None}, {"id": 1}]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    files = prepare(section(tmp_path / "a.jsonl"), tmp_path / "tokens", 0)
    assert "left out     2 records whose text is null or missing" in show(files)


def test_held_out_text_of_its_own(corpus: Path, tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "held" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(story(1000 + number), encoding="utf-8")
    own = section(corpus, validation_source=str(tmp_path / "held"), max_documents=30)
    files = prepare(own, tmp_path / "data", seed=0)
    everything = [path.read_text() for path in sorted(corpus.rglob("*.txt"))]
    # Nothing of the training text is held out, and its limit is not the held-out text's.
    assert texts(files, "train") == everything[:30]
    assert texts(files, "validation") == [story(1000 + number) for number in range(6)]
    assert (files.content["validation_from"], files.content["validation_fraction"]) == (1, 0.0)
    assert "Source 1 (files): licence not stated" in (files.folder / "croissant.json").read_text()
    assert "All of it is held out." in (files.folder / "croissant.json").read_text()
    lines = show(files).splitlines()
    assert f"source       {corpus}: 40 files" in "\n".join(lines)
    assert any(line.startswith(f"held out     {tmp_path / 'held'}: 6 files") for line in lines)
    assert prepare(own, tmp_path / "data", seed=0).digest == files.digest
    other = section(corpus, max_documents=30)
    with pytest.raises(DataError, match="made with other options"):
        prepare(other, tmp_path / "data", seed=0)
    without = prepare(other, tmp_path / "other", seed=0)
    assert "validation_from" not in without.content
    assert without.digest != files.digest
    (tmp_path / "held" / "0.txt").write_text("another text, and a longer one than before " * 20)
    with pytest.raises(DataError, match=r"held has changed since these token files were made"):
        prepare(own, tmp_path / "data", seed=0)
    (tmp_path / "few.txt").write_text("too little")
    few = section(corpus, validation_source=str(tmp_path / "few.txt"))
    with pytest.raises(DataError, match=r"data\.validation_source: the validation split has"):
        prepare(few, tmp_path / "few", seed=0)
    (tmp_path / "few.txt").write_text("\n")
    for rule in ("stream", "documents"):
        none = few.model_copy(update={"packing": rule})
        with pytest.raises(DataError, match=r"validation_source: the validation split has 0 tok"):
            prepare(none, tmp_path / "few", seed=0)


def test_held_out_text_of_a_hub_data_set_is_of_its_split(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def hub(name: str, data: DataSection) -> Any:
        asked.append((name, data.split))
        local = data.model_copy(update={"format": "text"})
        return read_source(str(corpus), local, lambda step, share: None)

    monkeypatch.setattr(source_groups, "HubSource", hub)
    own = section("someone/poems", format="hub", validation_source="someone/poems")
    prepare(own, tmp_path / "data", seed=0)
    assert asked == [("someone/poems", "train"), ("someone/poems", "validation")]


def test_token_files_that_do_not_fit_are_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    source, target = write_corpus(tmp_path / "corpus", documents=10), tmp_path / "data"
    said: list[str] = []
    first = prepare(section(source), target, seed=0, replaced=said.append)
    assert prepare(section(source), target, seed=0, replaced=said.append).digest == first.digest
    assert said == []
    (source / "part0" / "more.txt").write_text(story(99))
    with pytest.raises(DataError, match="has changed since these token files were made"):
        prepare(section(source), target, seed=0)
    second = prepare(section(source), target, seed=0, replaced=said.append)
    assert second.digest != first.digest
    assert "has changed since these token files were made" in said[0]
    # Nothing is lost if the new files cannot be made.
    with pytest.raises(DataError, match=r"lower data\.sequence_length"):
        prepare(section(source, sequence_length=10**6), target, seed=1, replaced=said.append)
    assert TokenFiles.open(target).digest == second.digest
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    # What a killed process has left of a replaced folder is removed by the next one.
    left = tmp_path / f".data.partial-{socket.gethostname()}-{2**22 - 1}-old"
    left.mkdir()
    prepare(section(source), target, seed=2, replaced=said.append)
    assert not left.exists()
