"""Files that a user named: a full disk leaves what was there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dilocox.errors import TrainingError
from dilocox.tools.planner import calibrate
from dilocox.utils.storage import overwrite
from tests.support.full_disk import FullDisk


def test_an_earlier_file_stays_if_the_disk_is_full(tmp_path: Path, full_disk: FullDisk) -> None:
    path = tmp_path / "votes.json"
    overwrite(path, "one\n")
    full_disk.leave(0)
    with pytest.raises(OSError, match="No space left"):
        overwrite(path, "two\n")
    full_disk.free()
    assert path.read_text() == "one\n"
    assert os.listdir(tmp_path) == ["votes.json"]
    overwrite(path, "two\n")
    assert path.read_text() == "two\n"


def test_rights_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "page.html", tmp_path / "newest.html"
    path.write_text("one")
    path.chmod(0o600)
    link.symlink_to(path)
    overwrite(link, "two")
    assert link.is_symlink()
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    overwrite(pipe, "a page")
    reader.join()
    assert read == ["a page"]
    assert pipe.is_fifo()


def test_a_table_of_speeds_stays(tmp_path: Path, full_disk: FullDisk) -> None:
    path = tmp_path / "local.toml"
    calibrate.write({"cpu": {"gflops": 1.0}}, path)
    before = path.read_text()
    full_disk.leave(0)
    with pytest.raises(TrainingError, match=r"local.toml: cannot be written \(No space left"):
        calibrate.write({"cpu": {"gflops": 2.0}}, path)
    assert path.read_text() == before
