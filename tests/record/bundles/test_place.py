"""A storage that is dead, slow or dishonest costs one line and a limited time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.errors import RecordError
from dilocox.record.bundles.place import DeniedError, Place, in_order
from dilocox.record.log.blob_store import MissingError


def test_files_of_a_folder(tmp_path: Path) -> None:
    for number, url in enumerate((str(tmp_path / "a"), f"file://{tmp_path}/b")):
        place = Place(url)
        assert place.size("x/y") is None
        with pytest.raises(MissingError):
            place.get("x/y", 10)
        place.put("x/y", b"12345")
        place.put("x/y", b"123")
        assert (place.size("x/y"), place.get("x/y", 3)) == (3, b"123")
        with pytest.raises(RecordError, match="larger"):
            place.get("x/y", 2)
        assert os.listdir(tmp_path / "ab"[number] / "x") == ["y"]


def test_a_folder_with_links_and_pipes_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "pub").mkdir()
    (tmp_path / "pub" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pub" / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(RecordError, match="plain files"):
            Place(str(tmp_path / "pub")).get(name, 100)


def test_passwords_and_unknown_protocols_are_refused() -> None:
    with pytest.raises(RecordError, match="holds a password") as refused:
        Place("ftp://user:geheim@host/run")
    assert "geheim" not in str(refused.value)
    with pytest.raises(RecordError, match="cannot be opened"):
        Place("nonsense://host/run")


class Storage:
    """What `Place` calls of a file system, which does as it is told."""

    protocol = "test"

    def __init__(self, does: object) -> None:
        self._does = does
        self.calls = 0

    def pipe_file(self, path: str, data: bytes) -> None:
        self.calls += 1
        if isinstance(self._does, BaseException):
            raise self._does
        assert isinstance(self._does, threading.Event)
        self._does.wait()

    def info(self, path: str) -> dict[str, int]:
        self.pipe_file(path, b"")
        return {}


def of(storage: Storage, seconds: float = 60.0, patience: float = 0.0) -> Place:
    place = Place("memory://run", patience, seconds)
    place._files = storage
    return place


def test_a_storage_that_says_nothing_is_given_up() -> None:
    free = threading.Event()
    try:
        with pytest.raises(RecordError, match=r"memory://run/a: cannot be written \(no answer for"):
            of(Storage(free), seconds=0.05).put("a", b"1")
    finally:
        free.set()


def test_errors_are_one_line() -> None:
    for error, said in (
        (RuntimeError("a\nb \x1b[2J"), r"memory://run/a: cannot be written \(a b .\[2J\)"),
        (OSError(5, "Input/output error"), r"\(Input/output error\)"),
        (RuntimeError(), r"\(RuntimeError\)"),
    ):
        with pytest.raises(RecordError, match=said):
            of(Storage(error)).put("a", b"1")
    with pytest.raises(DeniedError):
        of(Storage(PermissionError("no"))).size("a")


def test_failures_are_repeated_but_refusals_are_not() -> None:
    storage = Storage(OSError("reset"))
    with pytest.raises(RecordError, match="reset"):
        of(storage, patience=0.6).put("a", b"1")
    assert storage.calls == 2
    denied = Storage(PermissionError("no"))
    with pytest.raises(DeniedError):
        of(denied, patience=60.0).put("a", b"1")
    assert denied.calls == 1


def test_results_come_in_order_and_few_items_are_taken() -> None:
    taken: list[int] = []
    gate = threading.Barrier(3)

    def items() -> Iterator[int]:
        for number in range(9):
            taken.append(number)
            yield number

    def call(number: int) -> int:
        gate.wait(60)  # passes only if three calls run at once
        return -number

    for number, result in enumerate(in_order(call, items(), at_once=3)):
        assert result == -number
        assert len(taken) <= number + 4
    assert len(taken) == 9


def test_after_an_error_no_further_calls_begin() -> None:
    done: list[int] = []

    def call(number: int) -> int:
        if number == 2:
            raise RecordError("no")
        done.append(number)
        return number

    with pytest.raises(RecordError, match="no"):
        list(in_order(call, range(100), at_once=2))
    assert set(done) <= {0, 1, 3}
