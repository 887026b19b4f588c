"""The content-addressed store, in a folder and behind a URL."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.log.blob_store import MissingError, Store, Stores

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""SHA-256 of "abc", as FIPS 180-2 gives it."""


def test_what_is_put_lies_under_its_digest(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store.put(b"abc") == ABC
    assert (tmp_path / "sha256" / ABC[:2] / ABC[2:]).read_bytes() == b"abc"
    assert store.get(ABC) == b"abc"
    assert store.put(b"abc") == ABC, "again is no matter"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [ABC[2:]]


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30
)
@given(st.binary(max_size=200))
def test_everything_comes_back(tmp_path: Path, data: bytes) -> None:
    store = Store(str(tmp_path))
    assert store.get(store.put(data)) == data


def test_what_was_changed_is_not_given_out(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put(b"abc")
    Path(store.path(ABC)).write_bytes(b"abd")
    with pytest.raises(RecordError, match="holds other bytes than its name says"):
        store.get(ABC)


def test_what_is_put_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are on the disk before it has its name, and then the name is."""
    synced: list[tuple[str, bytes]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        number = os.fstat(descriptor).st_ino
        path = next(each for each in tmp_path.rglob("*") if each.stat().st_ino == number)
        if path.is_dir():
            held = [file.name for file in path.iterdir()]
            synced.append((f"folder with {held}", b""))
        else:
            synced.append((path.suffix, path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    Store(str(tmp_path)).put(b"abc")
    assert synced == [(".part", b"abc"), (f"folder with {[ABC[2:]]}", b"")]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not in the store"):
        Store(str(tmp_path)).get(ABC)


def test_a_url_is_a_store_too() -> None:
    store = Store("memory://record-test/store")
    store.put(b"abc")
    assert Store("memory://record-test/store").get(ABC) == b"abc"


def test_a_write_that_broke_off_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTP, say, shows a file from its first byte on, and the line drops after three of them."""
    store = Store("memory://record-test/broken", patience=30.0)
    whole, opened = store._files.open, list[str]()
    digest = hashlib.sha256(b"abcdef").hexdigest()

    class Breaks(io.BytesIO):
        def write(self, data: Any) -> int:
            with whole(store.path(digest), "wb") as file:
                file.write(bytes(data)[:3])
            raise ConnectionResetError("the line dropped")

    def open_(path: str, mode: str) -> Any:
        opened.append(path)
        return Breaks() if len(opened) == 1 else whole(path, mode)

    monkeypatch.setattr(store._files, "open", open_)
    store.put(b"abcdef")
    assert len(opened) == 2
    assert store.get(digest) == b"abcdef"
    store.put(b"abcdef")
    assert len(opened) == 2, "what is whole is not written again"


@pytest.mark.parametrize("where", ["nosuch://x", "abfs-of-nobody://y"])
def test_an_unknown_url_is_said(where: str) -> None:
    with pytest.raises(RecordError, match=r"record\.store"):
        Store(where)


@pytest.mark.parametrize("where", ["{folder}", "memory://record-test/states"])
def test_old_states_are_removed_and_nothing_else(where: str, tmp_path: Path) -> None:
    store = Store(where.format(folder=tmp_path))
    assert store.drop_states(9) == [], "none yet"
    store.put(b"abc")
    for round_ in (0, 2, 12):
        store.states(round_).put(b"abc")
    assert store.drop_states(3) == [0, 2]
    assert [store.states(round_).has(ABC) for round_ in (0, 2, 12)] == [False, False, True]
    assert store.get(ABC) == store.states(12).get(ABC) == b"abc"
    assert store.drop_states(3) == []


def test_old_states_that_stay_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    store.states(0).put(b"abc")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(store._files, "rm", refuse)
    with pytest.raises(RecordError, match=r"old states cannot be removed \(Operation not"):
        store.drop_states(3)


def test_a_full_or_closed_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "sha256").write_text("in the way")
    with pytest.raises(RecordError, match="cannot be written"):
        Store(str(tmp_path)).put(b"abc")


def test_several_stores_are_one(tmp_path: Path) -> None:
    one, two = Store(str(tmp_path / "one")), Store(str(tmp_path / "two"))
    both = Stores([one, two])
    with pytest.raises(MissingError, match="in none of"):
        both.get(ABC)
    two.put(b"abc")
    assert both.get(ABC) == b"abc"
    one.put(b"abc")
    Path(one.path(ABC)).write_bytes(b"bad")
    assert both.get(ABC) == b"abc", "a store that lies is passed over"
    Path(two.path(ABC)).unlink()
    with pytest.raises(RecordError, match="holds other bytes"):
        both.get(ABC)
    assert hashlib.sha256(b"abc").hexdigest() == ABC
