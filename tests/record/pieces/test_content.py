"""Content that is read range by range, from memory or from files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.log.digests import sha256
from dilocox.record.pieces import content
from dilocox.record.pieces.content import Content, InMemory, OnDisk, digest_of
from dilocox.record.pieces.cut import cut, cut_parts


@given(st.lists(st.binary(max_size=6), max_size=6), st.integers(0, 40), st.integers(0, 40))
def test_a_range_is_that_of_the_joined_bytes(objects: list[bytes], start: int, end: int) -> None:
    found = Content([InMemory(each) for each in objects])
    whole = b"".join(objects)
    assert found.size == len(whole)
    assert bytes(found.read(start, end)) == whole[start:end]


def test_files_are_cut_like_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "CHUNK", 3)
    objects = [b"payload of paris", b"", b"payload of lyon"]
    parts = []
    for number, each in enumerate(objects):
        path = tmp_path / str(number)
        path.write_bytes(each)
        parts.append(OnDisk(path, len(each)))
    assert [digest_of(each) for each in parts] == [sha256(each) for each in objects]
    assert cut_parts(parts, 2, 4) == cut(objects, 2, 4)


def test_a_file_that_is_gone_or_shorter_is_named(tmp_path: Path) -> None:
    """A file system over a network may lose a file while it is read; no signal ends the process."""
    path = tmp_path / "payload"
    with pytest.raises(RecordError, match=r"payload: cannot be read \(No such file"):
        cut_parts([OnDisk(path, 9)], 2, 4)
    path.write_bytes(b"short")
    with pytest.raises(RecordError, match="payload: has fewer bytes than it had"):
        cut_parts([OnDisk(path, 9)], 2, 4)
