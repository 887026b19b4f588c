"""Tar files of bundles: what is written is read again, and nothing else is."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import RecordError
from dilocox.record.bundles.tar_members import BLOCK, END, MalformedError, header, members, padding

OBJECT = f"record/store/sha256/ab/{'c' * 62}"
NAMES = ("model/config.json", "record/checkpoint", "record/statements-000001.jsonl", OBJECT)


def written(files: dict[str, bytes]) -> bytes:
    parts = [header(name, len(data)) + data + padding(len(data)) for name, data in files.items()]
    return b"".join(parts) + END


def read(data: bytes, size: int | None = None) -> dict[str, bytes]:
    file = io.BytesIO(data)
    found = members(file.read, len(data) if size is None else size)
    return {name: b"".join(content) for name, _, content in found}


@given(st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=1500), max_size=4))
def test_what_is_written_is_read_by_us_and_by_tar(files: dict[str, bytes]) -> None:
    data = written(files)
    assert read(data) == files
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == list(files)
        assert all(each.mtime == 0 and each.uid == 0 for each in archive)


def test_a_file_that_nobody_reads_is_skipped() -> None:
    data = written({"model/a": bytes(5000), "model/b": b"1"})
    names = [name for name, _, _ in members(io.BytesIO(data).read, len(data))]
    assert names == ["model/a", "model/b"]


@pytest.mark.parametrize(
    "name",
    [
        "../model/a", "model/../../a", "/etc/passwd", "model/a/b", "model/.hidden", "model/a\nb",
        "record/store/sha256/ab/short", f"{OBJECT}.exe", "coordinator/record-key", "private/a.key",
        "data/train-00000.bin", f"model/{'a' * 81}", "",
    ],
)  # fmt: skip
def test_other_names_are_neither_written_nor_read(name: str) -> None:
    with pytest.raises(RecordError, match="no file of this name"):
        header(name, 1)
    about = tarfile.TarInfo(name)
    with pytest.raises(MalformedError, match=r"not a file that a bundle may hold|not a tar file"):
        read(about.tobuf(tarfile.GNU_FORMAT) + END)


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE,
     tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE],
)  # fmt: skip
def test_nothing_but_plain_files_is_read(kind: bytes) -> None:
    about = tarfile.TarInfo("model/a")
    about.type, about.linkname = kind, "/etc/passwd"
    with pytest.raises(MalformedError, match="not a file that a bundle may hold"):
        read(about.tobuf(tarfile.GNU_FORMAT) + END)


@pytest.mark.parametrize("size", [BLOCK * 3 + 1, 2**40, 2**62])
def test_a_file_larger_than_its_bundle_is_refused(size: int) -> None:
    data = header("model/a", size) + bytes(BLOCK) + END
    with pytest.raises(MalformedError, match="larger than its bundle"):
        read(data)


def test_a_file_that_ends_too_early_is_refused() -> None:
    data = written({"model/a": bytes(3000)})
    for cut in range(0, len(data) - BLOCK, BLOCK):
        with pytest.raises(MalformedError, match="ends too early"):
            read(data[:cut], len(data))


def test_bytes_after_the_end_are_refused() -> None:
    data = written({"model/a": b"1"})
    with pytest.raises(MalformedError, match="after its end"):
        read(data + b"x")
    with pytest.raises(MalformedError, match="not a tar file"):
        read(b"\1" * BLOCK + data)
