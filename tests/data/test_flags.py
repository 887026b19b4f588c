"""Flags beside tokens: what is written, read, counted, and found when it is changed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data import TokenFiles, show
from dilocox.data.croissant import croissant
from dilocox.data.flags import COUNTED, STARTS, document_flags
from dilocox.data.packing import Packer
from dilocox.errors import DataError
from tests.data.flagged import Document, write_flagged

TRAIN: list[Document] = [([5, 6, 7], [0, 1, 1]), ([8], [0]), ([9, 10], [0, 1])]
HELD: list[Document] = [([11, 12], [1, 1])]


@pytest.fixture
def flagged(files: TokenFiles, tmp_path: Path) -> TokenFiles:
    return write_flagged(tmp_path / "flagged", files, TRAIN, HELD)


def test_text_has_no_flags_and_format_1(files: TokenFiles) -> None:
    assert files.flags("train") is None
    assert not files.has_flags
    assert files.manifest["format"] == 1
    assert not list(files.folder.glob("*.flags"))
    assert "counted" not in files.content["splits"]["train"]


def test_flags_stand_beside_the_tokens(flagged: TokenFiles) -> None:
    flags = flagged.flags("train")
    assert flags is not None
    assert flagged.manifest["format"] == 2
    assert flagged.has_flags
    zero = np.zeros(1, dtype=np.int64)
    assert flagged.tokens("train").gather(zero, 6).tolist() == [[5, 6, 7, 8, 9, 10]]
    first, counts = STARTS, COUNTED
    assert flags.gather(zero, 6).tolist() == [[first, counts, counts, first, first, counts]]
    assert flagged.document_ends("train").tolist() == [3, 4, 6]
    assert flagged.document_ends("validation").tolist() == [2]
    assert flagged.content["splits"]["train"]["counted"] == 3
    assert flagged.content["splits"]["validation"]["counted"] == 2
    assert "3 tokens count as labels" in show(flagged)
    flagged.verify()


def test_another_mask_is_another_digest(flagged: TokenFiles, files: TokenFiles) -> None:
    other: list[Document] = [*TRAIN[:2], ([9, 10], [0, 0])]
    again = write_flagged(flagged.folder.parent / "again", files, TRAIN, HELD)
    changed = write_flagged(flagged.folder.parent / "changed", files, other, HELD)
    assert again.digest == flagged.digest != changed.digest


def test_a_changed_flag_is_found_and_named(flagged: TokenFiles) -> None:
    path = flagged.folder / "train-00000.flags"
    path.write_bytes(bytes([2, 0, 1, 2, 2, 1]))
    with pytest.raises(DataError, match=r"train-00000\.flags: its digest differs"):
        TokenFiles.open(flagged.folder).verify()
    path.write_bytes(bytes(5))
    with pytest.raises(DataError, match=r"train-00000\.flags: 5 bytes instead of 6"):
        TokenFiles.open(flagged.folder)
    path.unlink()
    with pytest.raises(DataError, match=r"train-00000\.flags: missing"):
        TokenFiles.open(flagged.folder)


def test_flags_are_described(flagged: TokenFiles) -> None:
    described = croissant(flagged.content)
    names = [each["@id"] for each in described["distribution"]]
    assert "train-00000.flags" in names
    assert "closed by token" not in described["description"]
    assert "a byte of flags per token" in described["description"]
    json.dumps(described)


def test_begin_does_not_count_and_end_does(tmp_path: Path) -> None:
    packer = Packer(tmp_path, "train", 300, 99, 1 << 20, (98,), flagged=True)
    packer.add([[1, 2]], 2, [(0, 0)], [[0, 1]])
    packer.add([[3]], 1, [(0, 0)])
    packer.close()
    tokens = np.fromfile(tmp_path / "train-00000.bin", dtype="<u2")
    flags = np.fromfile(tmp_path / "train-00000.flags", dtype="u1")
    assert tokens.tolist() == [98, 1, 2, 99, 98, 3, 99]
    assert flags.tolist() == [2, 0, 1, 1, 2, 1, 1]
    assert packer.describe()["counted"] == 4


@pytest.mark.parametrize(("ids", "counted"), [([1, 2], [1]), ([1], [1, 1]), ([], [])])
def test_a_document_without_its_flags_is_refused(
    tmp_path: Path, ids: list[int], counted: list[int]
) -> None:
    packer = Packer(tmp_path, "train", 300, None, 1 << 20, flagged=True)
    with pytest.raises(ValueError, match="a document"):
        packer.add([ids], 2, [(0, 0)], [counted])


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=9),
    per_shard=st.integers(1, 20),
)
def test_flags_read_alike_however_they_are_cut_into_files(
    files: TokenFiles,
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[bool]],
    per_shard: int,
) -> None:
    train = [(list(range(len(each))), [int(one) for one in each]) for each in documents]
    folder = tmp_path_factory.mktemp("cut") / "files"
    got = write_flagged(folder, files, train, HELD, shard_bytes=2 * per_shard)
    flags, length = got.flags("train"), sum(map(len, documents))
    assert flags is not None
    expected = np.concatenate([document_flags(each) for each in documents])
    assert flags.gather(np.zeros(1, dtype=np.int64), length)[0].tolist() == expected.tolist()
    assert got.document_ends("train").tolist() == np.cumsum([len(d) for d in documents]).tolist()
    assert got.content["splits"]["train"]["counted"] == sum(map(sum, documents))
    got.verify()
