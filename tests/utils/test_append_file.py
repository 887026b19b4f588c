"""A file that grows by whole lines, whatever the disk does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dilocox.utils.append_file import AppendFile
from tests.support.full_disk import FullDisk

pytestmark = pytest.mark.waits


def test_a_line_is_there_whole_or_not_at_all(tmp_path: Path, full_disk: FullDisk) -> None:
    file = AppendFile(tmp_path / "lines")
    file.append(b"one\n")
    full_disk.leave(2)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"second\n")
    assert (tmp_path / "lines").read_bytes() == b"one\n"
    full_disk.free()
    file.append(b"second\n")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"one\nsecond\n"


def test_it_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"one\n")
    file = AppendFile(tmp_path / "lines")
    file.append(b"two\n")
    assert file.length == 8
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"


def test_what_a_failed_sync_may_have_lost_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync the kernel takes pages for written that are not."""
    path, fsync = tmp_path / "lines", os.fsync
    file = AppendFile(path, durable=True)
    file.append(b"one\n")
    file.sync()
    file.append(b"two\n")

    def losing(descriptor: int) -> None:
        os.pwrite(descriptor, b"\0\0\0\0", 4)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", losing)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    assert path.read_bytes() == b"one\n\0\0\0\0"
    monkeypatch.setattr(os, "fsync", fsync)
    file.append(b"three\n")
    file.sync()
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"
