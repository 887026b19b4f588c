"""Where token files may be made: behind a link, but not in place of a mount point."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dilocox.data import TokenFiles, prepare
from dilocox.data import folder as folder_module
from dilocox.errors import DataError
from tests.data.conftest import section
from tests.support.mounting import need_mounts


@contextmanager
def mounted(*words: str) -> Iterator[None]:
    """A mount as `mount WORDS` makes it; the last word is where."""
    subprocess.run(["mount", *words], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", words[-1]], check=True)


def refused(corpus: Path, folder: Path) -> str:
    """What `prepare` says, before it has read or written anything."""
    steps: list[str] = []
    with pytest.raises(DataError) as caught:
        prepare(section(corpus), folder, 0, lambda step, _: steps.append(step))
    assert steps == []
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays(corpus: Path, tmp_path: Path, there: bool) -> None:
    large, link = tmp_path / "large" / "disk", tmp_path / "small" / "data"
    link.parent.mkdir()
    link.symlink_to(large)
    if there:
        large.mkdir(parents=True)
    files = prepare(section(corpus), link, seed=0)
    assert files.folder == link
    assert link.is_symlink()
    assert TokenFiles.open(large).digest == files.digest
    assert list(link.parent.iterdir()) == [link]
    assert list(large.parent.iterdir()) == [large]
    assert prepare(section(corpus), link, seed=0).digest == files.digest


def test_the_disk_behind_the_link_is_the_one_that_is_measured(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "large" / "disk")
    usage = folder_module.shutil.disk_usage(tmp_path)
    asked: list[Path] = []
    monkeypatch.setattr(
        folder_module.shutil, "disk_usage", lambda path: asked.append(Path(path)) or usage
    )
    prepare(section(corpus), tmp_path / "data", seed=0)
    assert {path.parent for path in asked} == {tmp_path / "large"}


def test_links_in_a_circle_are_one_line(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match="name another folder"):
        prepare(section(corpus), tmp_path / "a", seed=0)


def test_a_mount_point_is_refused_before_anything_is_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, link = tmp_path / "disk", tmp_path / "data"
    disk.mkdir()
    link.symlink_to(disk)
    real = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk or real(path))
    for folder in (disk, link):
        text = refused(corpus, folder)
        assert text.startswith(f"{folder}: is a mount point")
        assert f"set data.folder to a folder below it, such as {folder}/tokens" in text
    (disk / "lost+found").mkdir()
    assert "is a mount point" in refused(corpus, disk)
    prepare(section(corpus), disk / "tokens", seed=0).verify()


def test_token_files_that_a_mount_point_holds_are_opened(
    files: TokenFiles, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    assert prepare(section(corpus), files.folder, seed=0).digest == files.digest


def test_real_mounts_are_seen_also_those_of_the_same_file_system(
    corpus: Path, tmp_path: Path
) -> None:
    point, source = tmp_path / "mount point", tmp_path / "source"
    point.mkdir()
    source.mkdir()
    need_mounts(point)
    with mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(point)):
        assert "is a mount point" in refused(corpus, point)
    with mounted("--bind", str(source), str(point)):
        assert "is a mount point" in refused(corpus, point)
