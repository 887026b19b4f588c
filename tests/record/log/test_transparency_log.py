"""The log on disk: growth, crashes, and everything that may have been done to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.errors import RecordError
from dilocox.record.log.signed_note import NoteKey, sign_note
from dilocox.record.log.transparency_log import (
    CHECKPOINT,
    ENTRIES,
    LogContent,
    LogWriter,
    as_signed,
    check_grown,
    check_log,
    open_log,
    read_log,
)

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
NAME = "dilocox/test"
PUBLIC = NoteKey(NAME, KEY.public_key().public_bytes_raw())


def written(folder: Path, *entries: str) -> LogContent:
    log = LogWriter(folder, NAME, KEY)
    for entry in entries:
        log.append(entry)
    log.close()
    return read_log(folder)


def recovered(folder: Path) -> list[str]:
    entries: list[str] = []
    LogWriter(folder, NAME, KEY, entries.append).release()
    return entries


def test_what_was_said_is_there_and_signed(tmp_path: Path) -> None:
    content = written(tmp_path, "one", "two")
    assert content.entries == ["one", "two"]
    assert content.public == str(PUBLIC)
    checkpoint = check_log(content, PUBLIC)
    assert (checkpoint.origin, checkpoint.size) == (NAME, 2)


def test_a_log_is_gone_on_with(tmp_path: Path) -> None:
    written(tmp_path, "one")
    assert written(tmp_path, "two").entries == ["one", "two"]
    assert check_log(read_log(tmp_path), PUBLIC).size == 2


def test_a_crash_between_entry_and_checkpoint(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, NAME, KEY)
    log.append("one")
    log.cover()
    log.append("two")
    # The process ends here: the entry is there, its checkpoint is not.
    with pytest.raises(RecordError, match="it was added to"):
        check_log(read_log(tmp_path), PUBLIC)
    assert recovered(tmp_path) == ["one", "two"]
    assert check_log(read_log(tmp_path), PUBLIC).size == 2


def test_a_crash_within_an_entry(tmp_path: Path) -> None:
    written(tmp_path, "one")
    with (tmp_path / ENTRIES).open("a") as file:
        file.write("half of tw")
    with pytest.raises(RecordError, match="cut short"):
        read_log(tmp_path)
    assert written(tmp_path, "two").entries == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one\ntwo\n", "it was cut"),
        ("one\ntwo\nthree\nfour\n", "it was added to"),
        ("one\nTwo\nthree\n", "was changed or moved"),
        ("two\none\nthree\n", "was changed or moved"),
    ],
)
def test_a_log_that_was_changed(tmp_path: Path, text: str, reason: str) -> None:
    written(tmp_path, "one", "two", "three")
    (tmp_path / ENTRIES).write_text(text)
    with pytest.raises(RecordError, match=reason):
        check_log(read_log(tmp_path), PUBLIC)
    if "four" not in text:
        with pytest.raises(RecordError, match="put back the files"):
            LogWriter(tmp_path, NAME, KEY)


def test_a_checkpoint_by_another_key(tmp_path: Path) -> None:
    content = written(tmp_path, "one")
    other = Ed25519PrivateKey.from_private_bytes(b"x" * 32)
    text = content.note.split("\n\n")[0] + "\n"
    (tmp_path / CHECKPOINT).write_text(sign_note(text, NAME, other))
    with pytest.raises(RecordError, match="is not signed by"):
        check_log(read_log(tmp_path), PUBLIC)
    with pytest.raises(RecordError, match="is not signed by"):
        LogWriter(tmp_path, NAME, KEY)


def test_a_log_has_grown_from_what_was_seen(tmp_path: Path) -> None:
    seen = written(tmp_path, "one", "two").note
    content = written(tmp_path, "three")
    assert check_grown(content, PUBLIC, seen).size == 2
    assert check_grown(content, PUBLIC, content.note).size == 3


def test_a_rolled_back_log_is_found(tmp_path: Path) -> None:
    seen = written(tmp_path / "now", "one", "two", "three").note
    back = written(tmp_path / "back", "one", "two")
    assert check_log(back, PUBLIC).size == 2, "on its own it looks whole"
    with pytest.raises(RecordError, match="it was cut back"):
        check_grown(back, PUBLIC, seen)


def test_a_fork_is_found(tmp_path: Path) -> None:
    seen = written(tmp_path / "told", "one", "two").note
    fork = written(tmp_path / "fork", "one", "other", "three")
    assert check_log(fork, PUBLIC).size == 3, "on its own it looks whole"
    with pytest.raises(RecordError, match="the same key has signed two different logs"):
        check_grown(fork, PUBLIC, seen)


@pytest.mark.parametrize("name", [ENTRIES, CHECKPOINT, "log.pub"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    written(tmp_path, "one")
    (tmp_path / name).unlink()
    with pytest.raises(RecordError, match=f"{name}: missing"):
        read_log(tmp_path)
    if name == ENTRIES:
        with pytest.raises(RecordError, match="put the file back"):
            LogWriter(tmp_path, NAME, KEY)


def test_a_log_that_is_changed_while_it_is_read(tmp_path: Path) -> None:
    """Its entries are read twice from the disk: what is judged is what was signed."""
    written(tmp_path, "one", "two")
    content = open_log(tmp_path)
    assert content.entries == read_log(tmp_path).entries
    check_log(content, PUBLIC)
    assert list(as_signed(content, PUBLIC)) == ["one", "two"]
    (tmp_path / ENTRIES).write_text("one\nowt\n")
    with pytest.raises(RecordError, match="was changed while it was read"):
        list(as_signed(content, PUBLIC))
