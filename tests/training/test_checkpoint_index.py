"""A folder of a stranger never runs: its index of tensors is data, whoever wrote it."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from dilocox.errors import CheckpointError
from dilocox.training import checkpoint_index, checkpoint_io
from dilocox.training.checkpoint_io import load, rank_folder
from tests.training.test_checkpoint_io import RANK, Saver, same_bits, tensors

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def saved(root: Path) -> Path:
    """The folder of a checkpoint at tick 7."""
    assert Saver(str(root)).save(7)
    return Path(rank_folder(str(root), 7, *RANK)) / "write-1"


def signed(folder: Path) -> str:
    """What the run recorded of the folder as it is now: a stranger writes the digests, too."""
    names = [entry.name for entry in folder.iterdir() if entry.name != "files.json"]
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    text = json.dumps({"format": 1, "files": files}).encode()
    (folder / "files.json").write_bytes(text)
    return hashlib.sha256(text).hexdigest()


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("old", [False, True])
def test_the_pickle_of_a_strangers_folder_is_not_run(tmp_path: Path, old: bool) -> None:
    folder = saved(tmp_path)
    proof = tmp_path / "it-ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(proof)))
    if old:
        (folder / "tensors.json").unlink()
        with pytest.raises(CheckpointError, match=r"\.metadata: not an index of tensors"):
            load(str(tmp_path), 7, *RANK, signed(folder))
    else:
        load(str(tmp_path), 7, *RANK, signed(folder))
    assert not proof.exists()


def test_checkpoints_of_earlier_versions_are_read_to_the_bit(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "tensors.json").unlink()
    loaded = load(str(tmp_path), 7, *RANK, signed(folder))
    assert set(loaded.tensors) == set(tensors())
    for name, tensor in tensors().items():
        assert same_bits(loaded.tensors[name], tensor), name


def test_both_indices_are_the_same(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    new = checkpoint_index.from_json((folder / "tensors.json").read_bytes(), "new")
    assert new == checkpoint_index.from_pickle((folder / ".metadata").read_bytes(), "old")
    assert set(new) == set(tensors())


def _getattr() -> bytes:
    return b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93."


def _dotted() -> bytes:
    return b"\x80\x04\x8c\x05torch\x8c\x0cload.__call__\x93."


def _old_global() -> bytes:
    return b"cos\nsystem\n(S'true'\ntR."


def _large_memo() -> bytes:
    """Asks Python for 32 GiB."""
    return b"\x80\x04Nr\xff\xff\xff\x7f."


@pytest.mark.parametrize(
    "text",
    [
        _getattr,
        _dotted,
        _old_global,
        _large_memo,
        lambda: b"",
        lambda: pickle.dumps([1]),
        lambda: pickle.dumps(torch.float32),
        lambda: pickle.dumps(Metadata({"x": 1})),  # type: ignore[dict-item]
        lambda: pickle.dumps(torch.Size([1])),
    ],
)
def test_another_pickle_is_refused_in_one_line(text: Callable[[], bytes]) -> None:
    with pytest.raises(CheckpointError, match="here: not an index of tensors") as caught:
        checkpoint_index.from_pickle(text(), "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "../../../../etc/hostname"),
        ("file", "/etc/hostname"),
        ("file", 3),
        ("dtype", "save"),
        ("dtype", "__dict__"),
        ("shape", [10**15]),
        ("shape", [-1, -1]),
        ("shape", [1.5]),
        ("offset", -1),
        ("length", True),
        ("more", 1),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, field: str, value: object) -> None:
    folder = saved(tmp_path)
    document = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    document["tensors"]["live/w"][field] = value
    (folder / "tensors.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tensors\.json: not an index"):
        load(str(tmp_path), 7, *RANK, signed(folder))


def test_an_index_that_names_another_tensor_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    document = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    document["tensors"]["live/w"]["shape"] = [7, 5]
    (folder / "tensors.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match="another tensor"):
        load(str(tmp_path), 7, *RANK, signed(folder))


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_only_regular_files_of_the_folder_are_opened(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path)
    digest = signed(folder)
    target = folder / "__0_0.distcp"
    content = target.read_bytes()
    target.unlink()
    if kind == "pipe":
        os.mkfifo(target)
    else:
        (tmp_path / "private").write_bytes(content)
        target.symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=f"distcp: a {kind}"):
        load(str(tmp_path), 7, *RANK, digest)


@pytest.mark.parametrize("name", ["../state.json", "/etc/hostname", ".."])
def test_a_listing_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    text = json.dumps({"format": 1, "files": {name: "0" * 64}}).encode()
    (folder / "files.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"files\.json: .*not a list of files"):
        load(str(tmp_path), 7, *RANK, hashlib.sha256(text).hexdigest())


def test_the_limits_hold_for_what_dilocox_writes() -> None:
    assert checkpoint_io.FORMAT_VERSION == 1, "earlier versions read what this version writes"
