"""Checkpoints of one rank on disk: all data from which the rank continues bit for bit.

A checkpoint is a folder `tick-00000120/paris/stage0-shard0/write-1/`. It holds the tensors, as
`torch.distributed.checkpoint` writes them, their index `tensors.json`, and `state.json`.
`files.json` is written last and holds the SHA-256 of the other files. Without `files.json` a
checkpoint does not count; the coordinator records the digest of `files.json`. PyTorch writes an
index of its own, a pickle that is never run (see `checkpoint_index`).

A tick may be written again, if a run was resumed and stopped at once. The new folder is then
written beside the old one, which stays until the new one is recorded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dilocox.errors import CheckpointError, DilocoxError
from dilocox.training import checkpoint_index
from dilocox.utils import tracing
from dilocox.utils.storage import is_local, opened, retry, unsafe_reason
from dilocox.utils.torch_internals import checkpoint_writer

log = logging.getLogger(__name__)

FAILURES = (Exception, CheckpointException)
"""Errors of a failed write. PyTorch's own error is not a subclass of `Exception`."""

FORMAT_VERSION = 1
LOOK = 0.2
"""Seconds between two signs of life of a rank that waits for its disk."""

Take = Callable[[Mapping[str, torch.Tensor]], Callable[[], Mapping[str, torch.Tensor]]]
"""Starts to copy tensors, with their current values, to host memory. The returned function waits
for the copies and returns them."""


def copied(tensors: Mapping[str, torch.Tensor]) -> Callable[[], Mapping[str, torch.Tensor]]:
    """Copy all tensors at once. This is the simplest `Take`."""
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return lambda: copies


def tick_folder(root: str, tick: int) -> str:
    """Return the folder (path or fsspec URL) of the whole run's checkpoint at `tick`."""
    return f"{root.rstrip('/')}/tick-{tick:08d}"


def rank_folder(root: str, tick: int, site: str, stage: int, shard: int) -> str:
    """Return the folder of one rank's part of the checkpoint at `tick`."""
    return f"{tick_folder(root, tick)}/{site}/stage{stage}-shard{shard}"


@dataclass(frozen=True)
class Loaded:
    """Tensors and state of a checkpoint, as `load` returns them."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class RankCheckpointer:
    """Writes one rank's checkpoints while training goes on, and deletes old checkpoints.

    Only one write runs at a time; a second `save` waits for the first.

    Args:
        root: path or fsspec URL of all checkpoints.
        keep: number of this rank's newest checkpoints that are kept.
        whole: returns the tick of the newest checkpoint that all ranks of the run have written,
            or None. That checkpoint and later ones are kept, whatever `keep` is.
        patience: seconds for which a failed write to storage over a network is retried.
        take: copies tensors to host memory.
    """

    def __init__(
        self,
        root: str,
        site: str,
        stage: int,
        shard: int,
        keep: int,
        whole: Callable[[], int | None] | None = None,
        patience: float = 0.0,
        take: Take = copied,
    ) -> None:
        self._root = root
        self._take = take
        self._whole = whole
        self._rank = (site, stage, shard)
        self._keep = keep
        self._patience = patience
        self._writing: threading.Thread | None = None
        self._began = (0, 0.0)

    @property
    def behind(self) -> tuple[int, float] | None:
        """(tick, seconds so far) of the current write. None if no write is running."""
        if self._writing is None or not self._writing.is_alive():
            return None
        return self._began[0], time.monotonic() - self._began[1]

    def save(
        self,
        tick: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        on_written: Callable[[int, str], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        """Copy `tensors` to host memory now, and write the copies in the background.

        The writing thread calls `on_written(tick, digest)` when all files are on disk. If the
        write fails or `on_written` raises, it calls `on_failed(tick, reason)`: a full or broken
        disk is reported and does not end the run.
        """
        self.wait()
        folder = rank_folder(self._root, tick, *self._rank)
        snapshot = self._take(tensors)
        document = json.dumps({"format": FORMAT_VERSION, "tick": tick, **state}, sort_keys=True)

        def write() -> None:
            try:
                with tracing.span("write checkpoint", tick=tick):
                    attempt, digest = retry(
                        lambda: _attempt(folder, snapshot(), document),
                        folder,
                        self._patience,
                        failures=FAILURES,
                        reason=_reason,
                    )
                on_written(tick, digest)
            except FAILURES as error:
                on_failed(tick, _reason(error))
                return
            try:
                self._retire(tick, attempt)
            except FAILURES as error:  # other people's storage, over a network
                # The new checkpoint is complete. A later one deletes what was not deleted here.
                log.warning("older checkpoints were not deleted: %s", _reason(error))

        self._began = (tick, time.monotonic())
        self._writing = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self, touch: Callable[[], None] = lambda: None) -> None:
        """Wait without a limit until the current write has ended.

        `touch` is called meanwhile, so that the rank keeps counting as alive.
        """
        while self._writing is not None and self._writing.is_alive():
            self._writing.join(LOOK)
            touch()
        self._writing = None

    def _retire(self, tick: int, attempt: str) -> None:
        """Delete checkpoints that are needless now that the one at `tick` is recorded.

        Checkpoints of later ticks are left alone. They come from before a resume, and are written
        again when the run reaches their ticks.
        """
        filesystem, root = opened(self._root)
        for other in _attempts(filesystem, rank_folder(root, tick, *self._rank)):
            if other != attempt:
                filesystem.rm(other, recursive=True)
        ticks = [old for old in _ticks(filesystem, root) if old <= tick]
        # If another rank's disk is full, the newest checkpoint that can be resumed may be old.
        spared = tick if self._whole is None else (self._whole() or 0)
        # A failed write leaves an empty folder, which must not displace a complete checkpoint.
        whole = [old for old in ticks if exists(self._root, old, *self._rank)]
        if not whole:
            return  # another program has moved even the new one away, so nothing is needless
        spared = min(spared, *whole[-self._keep :])
        for old in [old for old in ticks if old < spared]:
            path = rank_folder(root, old, *self._rank)
            if filesystem.exists(path):
                filesystem.rm(path, recursive=True)
            # The last rank that deletes its part also removes the empty folders.
            for _ in range(2):
                path = path.rsplit("/", 1)[0]
                try:
                    if filesystem.exists(path) and not filesystem.ls(path):
                        filesystem.rmdir(path)
                except OSError:
                    break  # another rank was faster, or object storage, which has no folders


def _reason(error: BaseException) -> str:
    """Return the cause of `error` in one line.

    PyTorch wraps causes in `CheckpointException`, which is not a subclass of `Exception`.
    """
    if isinstance(error, CheckpointException):
        error = next((failure[0] for failure in error.failures.values()), error)
    # On a full disk the last error is often raised while a file is closed; take the first cause.
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(
        ": "
    )


def _names(filesystem: Any, path: str) -> list[str]:
    """Return the sorted names in a folder. Empty if the folder does not exist."""
    filesystem.invalidate_cache()  # other ranks write to the same storage
    if not filesystem.exists(path):
        return []
    listed = filesystem.ls(path, detail=False)
    return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in listed)


def _ticks(filesystem: Any, root: str) -> list[int]:
    parts = [name.removeprefix("tick-") for name in _names(filesystem, root)]
    return sorted(int(part) for part in parts if part.isdecimal())


def _attempts(filesystem: Any, path: str) -> list[str]:
    """Return the folders of this rank's writes of one tick, oldest first."""
    parts = [name.removeprefix("write-") for name in _names(filesystem, path)]
    return [f"{path}/write-{number}" for number in sorted(int(p) for p in parts if p.isdecimal())]


def _attempt(folder: str, tensors: Mapping[str, torch.Tensor], document: str) -> tuple[str, str]:
    """Write a checkpoint into a new folder below `folder`.

    Returns the path of the new folder and the digest of its `files.json`.
    """
    filesystem, path = opened(folder)
    earlier = _attempts(filesystem, path)
    number = 1 + int(earlier[-1].rsplit("-", 1)[1]) if earlier else 1
    attempt = f"{path}/write-{number}"
    filesystem.makedirs(attempt, exist_ok=True)
    try:
        # Not async_save: this already is a separate thread, and async_save would copy all again.
        index: dict[str, checkpoint_index.Entry] = {}
        writer = checkpoint_writer(
            filesystem,
            attempt,
            lambda *written: index.update(checkpoint_index.index_of(*written)),
        )
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
        with filesystem.open(f"{attempt}/{checkpoint_index.FILE}", "wb") as file:
            file.write(checkpoint_index.to_json(index))
        with filesystem.open(f"{attempt}/state.json", "wb") as file:
            file.write(document.encode())
        listing = {
            name: _sha256(filesystem, f"{attempt}/{name}") for name in _names(filesystem, attempt)
        }
        text = json.dumps({"format": FORMAT_VERSION, "files": listing}, sort_keys=True).encode()
        with filesystem.open(f"{attempt}/files.json.part", "wb") as file:
            file.write(text)
        filesystem.mv(f"{attempt}/files.json.part", f"{attempt}/files.json")
    except BaseException:
        # On a full disk the remains would take the space of the next checkpoint.
        try:
            filesystem.rm(attempt, recursive=True)
        except Exception as error:  # other people's storage, over a network
            log.warning("%s: could not be deleted: %s", attempt, _reason(error))
        raise
    return attempt, hashlib.sha256(text).hexdigest()


def exists(root: str, tick: int, site: str, stage: int, shard: int) -> bool:
    """Return whether the root holds a complete checkpoint of this rank at `tick`."""
    filesystem, path = opened(rank_folder(root, tick, site, stage, shard))
    return any(
        filesystem.exists(f"{attempt}/files.json") for attempt in _attempts(filesystem, path)
    )


def load(
    root: str, tick: int, site: str, stage: int, shard: int, digest: str, patience: float = 0.0
) -> Loaded:
    """Read one rank's checkpoint, and check it by `digest`, the SHA-256 of its `files.json`.

    A failed read from storage over a network is retried for `patience` seconds. Raises
    `CheckpointError` that names the file if a file is missing, changed or of another format, or
    if the storage does not answer.
    """
    try:
        return retry(
            lambda: _load(root, tick, site, stage, shard, digest),
            root,
            patience,
            failures=FAILURES,
            reason=_reason,
        )
    except DilocoxError:
        raise
    except FAILURES as error:
        raise CheckpointError(f"{root}: cannot be read ({_reason(error)})") from None


def _load(root: str, tick: int, site: str, stage: int, shard: int, digest: str) -> Loaded:
    folder = rank_folder(root, tick, site, stage, shard)
    filesystem, path = opened(folder)
    attempt, listing = _recorded(filesystem, path, folder, digest)
    for name, expected in listing["files"].items():
        entry = f"{attempt}/{name}"
        _check_plain(filesystem, entry, attempt)
        if not filesystem.exists(entry) or _sha256(filesystem, entry) != expected:
            raise CheckpointError(
                f"{entry}: missing or changed since it was written; put it back, or resume from "
                "another checkpoint"
            )
    tensors = _read_tensors(filesystem, attempt, listing["files"])
    return Loaded(tensors, json.loads(filesystem.cat_file(f"{attempt}/state.json")))


def _check_plain(filesystem: Any, path: str, attempt: str) -> None:
    """Raise `CheckpointError` if `path` is a pipe, a device, or a link out of the folder."""
    reason = unsafe_reason(Path(path), Path(attempt)) if is_local(filesystem) else ""
    if reason:
        raise CheckpointError(f"{path}: {reason}; copy the checkpoint again, as plain files")


def _read_tensors(
    filesystem: Any, attempt: str, listed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return the tensors by name from files whose digests were checked. Nothing is unpickled."""
    old = checkpoint_index.FILE not in listed
    name = checkpoint_index.OLD_FILE if old else checkpoint_index.FILE
    where = f"{attempt}/{name}"
    parse = checkpoint_index.from_pickle if old else checkpoint_index.from_json
    index = parse(filesystem.cat_file(where), where) if name in listed or not old else {}
    by_file: dict[str, dict[str, checkpoint_index.Entry]] = {}
    for tensor, entry in index.items():
        by_file.setdefault(entry.file, {})[tensor] = entry
    read = {}
    for file_name, entries in by_file.items():
        path = f"{attempt}/{file_name}"
        size = filesystem.size(path) if file_name in listed else 0
        with filesystem.open(path, "rb") as file:
            for tensor, entry in sorted(entries.items(), key=lambda item: item[1].offset):
                if entry.offset + entry.length > size:
                    raise CheckpointError(
                        f"{where}: tensor {tensor!r} lies beyond the end of {file_name}; resume "
                        "from another checkpoint"
                    )
                read[tensor] = entry.read(file)
    return {tensor: read[tensor] for tensor in index}


def _recorded(filesystem: Any, path: str, folder: str, digest: str) -> tuple[str, dict[str, Any]]:
    """Return folder and list of files of the write whose `files.json` has the SHA-256 `digest`."""
    whole = [
        attempt
        for attempt in _attempts(filesystem, path)
        if filesystem.exists(f"{attempt}/files.json")
    ]
    if not whole:
        raise CheckpointError(f"{folder}: no checkpoint is here; was the folder moved?")
    for attempt in whole:
        _check_plain(filesystem, f"{attempt}/files.json", attempt)
        text = filesystem.cat_file(f"{attempt}/files.json")
        if hashlib.sha256(text).hexdigest() != digest:
            continue
        listing: dict[str, Any] = json.loads(text)
        if listing["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{attempt}: checkpoint format {listing['format']}, this version reads "
                f"{FORMAT_VERSION}; resume with the version that wrote it"
            )
        if not all(checkpoint_index.is_plain_name(name) for name in listing["files"]):
            raise CheckpointError(
                f"{attempt}/files.json: not a list of files of this folder; resume from another "
                "checkpoint"
            )
        return attempt, listing
    raise CheckpointError(
        f"{whole[-1]}/files.json: not the file that the run recorded; put that file back, or "
        "resume from another checkpoint"
    )


def _sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
