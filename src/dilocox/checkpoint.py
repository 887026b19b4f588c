"""Checkpoints of one rank: everything that it needs to go on bit for bit.

A checkpoint is a folder `tick-00000120/paris/stage0-shard0/` with the tensors
(`torch.distributed.checkpoint`), `state.json`, and, written last, `files.json` with the sha256 of
the others. Without `files.json` it does not exist; its digest is what the coordinator records, so
nothing is unpickled (the tensors' metadata is a pickle) that this run did not write itself.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dilocox.errors import CheckpointError

FORMAT_VERSION = 1


def tick_folder(root: str, tick: int) -> str:
    """Folder (path or fsspec URL) of the whole run's checkpoint at `tick`."""
    return f"{root.rstrip('/')}/tick-{tick:08d}"


def rank_folder(root: str, tick: int, site: str, stage: int, shard: int) -> str:
    """Folder of one rank's part of the checkpoint at `tick`."""
    return f"{tick_folder(root, tick)}/{site}/stage{stage}-shard{shard}"


@dataclass(frozen=True)
class Loaded:
    """What `load` gives back."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class RankCheckpointer:
    """Writes one rank's checkpoints beside the training, and deletes old ones.

    `root` is a path or any fsspec URL. One write is under way at a time; a second `save` waits
    for the first.
    """

    def __init__(self, root: str, site: str, stage: int, shard: int, keep: int) -> None:
        self._root = root
        self._rank = (site, stage, shard)
        self._keep = keep
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._written: list[int] = []

    def save(
        self,
        tick: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        on_written: Callable[[int, str], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        """Snapshot now, write in the background.

        `tensors` are copied to host memory before this returns. `on_written(tick, digest)` is
        called from the writing thread when all is on disk, `on_failed(tick, reason)` if not: a
        full or broken disk is reported and does not end the run.
        """
        self.wait()
        folder = rank_folder(self._root, tick, *self._rank)
        snapshot = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        document = json.dumps({"format": FORMAT_VERSION, "tick": tick, **state}, sort_keys=True)

        def write() -> None:
            try:
                digest = _write(folder, snapshot, document)
            except Exception as error:
                on_failed(tick, f"{type(error).__name__}: {error}")
                return
            on_written(tick, digest)
            self._retire(tick)

        self._writing = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until the write under way has ended."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _retire(self, tick: int) -> None:
        self._written.append(tick)
        while len(self._written) > self._keep:
            old = self._written.pop(0)
            filesystem, path = fsspec.core.url_to_fs(rank_folder(self._root, old, *self._rank))
            if filesystem.exists(path):
                filesystem.rm(path, recursive=True)
            # The last rank of the last site to leave takes the empty folders along.
            for _ in range(2):
                path = path.rsplit("/", 1)[0]
                if filesystem.exists(path) and not filesystem.ls(path):
                    try:
                        filesystem.rmdir(path)
                    except (OSError, NotImplementedError):
                        break


def _write(folder: str, tensors: Mapping[str, torch.Tensor], document: str) -> str:
    filesystem, path = fsspec.core.url_to_fs(folder)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)
    filesystem.makedirs(path, exist_ok=True)
    # Already in a thread of its own, on a snapshot: async_save would copy everything again.
    dcp.save(dict(tensors), storage_writer=FsspecWriter(folder), no_dist=True)
    with filesystem.open(f"{path}/state.json", "wb") as file:
        file.write(document.encode())
    listing = {}
    for entry in sorted(filesystem.ls(path, detail=False)):
        name = entry.rsplit("/", 1)[-1]
        listing[name] = _sha256(filesystem, entry)
    text = json.dumps({"format": FORMAT_VERSION, "files": listing}, sort_keys=True).encode()
    with filesystem.open(f"{path}/files.json.part", "wb") as file:
        file.write(text)
    filesystem.mv(f"{path}/files.json.part", f"{path}/files.json")
    return hashlib.sha256(text).hexdigest()


def exists(root: str, tick: int, site: str, stage: int, shard: int) -> bool:
    """True if a whole checkpoint of this rank is there."""
    filesystem, path = fsspec.core.url_to_fs(rank_folder(root, tick, site, stage, shard))
    return bool(filesystem.exists(f"{path}/files.json"))


def load(root: str, tick: int, site: str, stage: int, shard: int, digest: str) -> Loaded:
    """Read one rank's checkpoint after checking it against `digest`.

    Raises `CheckpointError` naming the file if it is missing, changed or of another format.
    """
    folder = rank_folder(root, tick, site, stage, shard)
    filesystem, path = fsspec.core.url_to_fs(folder)
    if not filesystem.exists(f"{path}/files.json"):
        raise CheckpointError(f"{folder}: no checkpoint is here; was the folder moved?")
    text = filesystem.cat_file(f"{path}/files.json")
    if hashlib.sha256(text).hexdigest() != digest:
        raise CheckpointError(f"{folder}/files.json: not what the run recorded; it was changed")
    listing = json.loads(text)
    if listing["format"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: checkpoint format {listing['format']}, this version reads {FORMAT_VERSION}"
        )
    for name, expected in listing["files"].items():
        entry = f"{path}/{name}"
        if not filesystem.exists(entry) or _sha256(filesystem, entry) != expected:
            raise CheckpointError(f"{folder}/{name}: missing or changed since it was written")
    metadata = FsspecReader(folder).read_metadata()
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(tensors, storage_reader=FsspecReader(folder), no_dist=True)
    return Loaded(tensors, json.loads(filesystem.cat_file(f"{path}/state.json")))


def _sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
