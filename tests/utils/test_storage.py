"""Storage over a network that fails now and then, and places with colons in their names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from dilocox.errors import CheckpointError, RecordError
from dilocox.record.bundles.place import Place
from dilocox.record.log.blob_store import Store
from dilocox.record.log.digests import sha256
from dilocox.record.verify.remote import fetched, fetched_log
from dilocox.training.checkpoint_io import RankCheckpointer, load
from dilocox.utils.storage import is_local, nearest_existing, opened, retry

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """In memory; opening a file fails as often as `failures` says."""

    protocol = "flaky"
    cachable = False
    failures = 0

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        """As `MemoryFileSystem.open`, or an error that is not even an `OSError`."""
        if FlakyFileSystem.failures > 0:
            FlakyFileSystem.failures -= 1
            raise RuntimeError("503 Slow Down")
        return super().open(path, *arguments, **options)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The file system is known to fsspec; pauses are noted, not taken."""
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    pauses: list[float] = []
    monkeypatch.setitem(retry.__kwdefaults__, "sleep", pauses.append)
    yield pauses
    FlakyFileSystem.failures = 0


def test_pauses_double_until_the_time_is_over() -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        retry(fail, "memory://x", 10.0, clock=lambda: now[0], sleep=sleep)
    # 0.5 + 1 + 2 + 4 are 7.5 s; 8 more would be too many.
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_what_is_wrong_for_good_is_not_tried_again() -> None:
    calls = []

    def refuse() -> None:
        calls.append(1)
        raise CheckpointError("changed since it was written")

    with pytest.raises(CheckpointError):
        retry(refuse, "memory://x", 10.0, sleep=lambda _: None)
    assert len(calls) == 1


def test_a_checkpoint_outlasts_failures_of_its_storage(
    flaky: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    digests: dict[int, str] = {}
    failed: list[str] = []
    writer = RankCheckpointer("flaky://runs/a", "paris", 0, 0, 2, patience=60.0)
    FlakyFileSystem.failures = 2
    with caplog.at_level(logging.WARNING):
        writer.save(
            3, {"w": torch.ones(5)}, {}, digests.__setitem__, lambda _, why: failed.append(why)
        )
        writer.wait()
    assert not failed
    assert flaky == [0.5, 1.0]
    assert "503 Slow Down; trying again in 0.5 s" in caplog.text
    FlakyFileSystem.failures = 1
    found = load("flaky://runs/a", 3, "paris", 0, 0, digests[3], patience=60.0)
    assert torch.equal(found.tensors["w"], torch.ones(5))
    FlakyFileSystem.failures = 10**6
    with pytest.raises(CheckpointError, match="cannot be read"):
        load("flaky://runs/a", 3, "paris", 0, 0, digests[3], patience=0.0)


def test_storage_that_stays_away_is_reported(flaky: list[float]) -> None:
    failed: list[str] = []
    writer = RankCheckpointer("flaky://runs/b", "paris", 0, 0, 2, patience=1.0)
    FlakyFileSystem.failures = 10**6
    writer.save(3, {"w": torch.ones(5)}, {}, lambda *_: None, lambda _, why: failed.append(why))
    writer.wait()
    assert len(failed) == 1
    assert "503 Slow Down" in failed[0]


def test_a_folder_of_this_machine_is_not_tried_again(tmp_path: Path, flaky: list[float]) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    failed: list[str] = []
    writer = RankCheckpointer(str(tmp_path / "file"), "paris", 0, 0, 2, patience=60.0)
    writer.save(3, {"w": torch.ones(5)}, {}, lambda *_: None, lambda _, why: failed.append(why))
    writer.wait()
    assert len(failed) == 1
    assert flaky == []


def test_the_record_outlasts_them_too(flaky: list[float]) -> None:
    store = Store("flaky://record", patience=60.0)
    FlakyFileSystem.failures = 3
    digest = store.put(b"payload")
    assert digest == sha256(b"payload")
    assert store.get(digest) == b"payload"
    assert flaky == [0.5, 1.0, 2.0]
    FlakyFileSystem.failures = 10**6
    with pytest.raises(RecordError, match=r"cannot be written \(503 Slow Down\)"):
        Store("flaky://record").put(b"another")


@pytest.mark.parametrize("name", ["exp::1", "exp::one", "a/s3::b/c", "file:exp", "local:exp", "::"])
@pytest.mark.parametrize("relative", [False, True])
def test_colons_in_a_path_are_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, relative: bool
) -> None:
    """What is written to such a folder lies there, and in no other folder."""
    monkeypatch.chdir(tmp_path)
    root = name if relative else str(tmp_path / name)
    files, path = opened(root)
    assert is_local(files)
    assert path == str(tmp_path / name)
    digests: dict[int, str] = {}
    failed: list[str] = []
    for stage in (0, 1):
        writer = RankCheckpointer(root, "paris", stage, 0, 2)
        tensors = {"w": torch.full((4,), float(stage))}
        writer.save(
            3,
            tensors,
            {},
            lambda _, digest, stage=stage: digests.__setitem__(stage, digest),
            lambda _, why: failed.append(why),
        )
        writer.wait()
    assert not failed
    for stage in (0, 1):
        found = load(root, 3, "paris", stage, 0, digests[stage])
        assert found.tensors["w"].tolist() == [float(stage)] * 4
    digest = Store(root).put(b"payload")
    assert Store(root).get(digest) == b"payload"
    assert Store(root).folder == tmp_path / name
    Place(root).put("pieces/x", b"piece")
    assert Place(root).get("pieces/x", 10) == b"piece"
    written = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert len(written) > 10
    assert all(each.is_relative_to(tmp_path / name) for each in written)


@pytest.mark.parametrize(("path", "found"), [("/a/b", "/"), ("a/b", "."), ("/", "/")])
def test_the_search_for_a_folder_ends(
    monkeypatch: pytest.MonkeyPatch, path: str, found: str
) -> None:
    """Even if nothing can be looked at, as on a network drive whose server is gone."""
    monkeypatch.setattr("os.path.exists", lambda _: False)
    assert str(nearest_existing(Path(path))) == found


def test_the_home_folder_is_still_written_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere/home")
    assert opened("~/kept/")[1] == "/somewhere/home/kept"
    assert opened("/")[1] == "/"


@pytest.mark.parametrize("url", ["memory://runs/a::1", "simplecache::memory://a", "http://[::1]/a"])
def test_a_url_with_colons_between_places_is_refused(url: str) -> None:
    """By all that opens a storage, with the reason."""
    reason = "fsspec takes :: for the border between two places"
    with pytest.raises(ValueError, match=reason):
        opened(url)
    for opens in (Store, Place):
        with pytest.raises(RecordError, match=reason):
            opens(url)
    for fetches in (fetched, fetched_log):
        with pytest.raises(RecordError, match=reason), fetches(url):
            pass
