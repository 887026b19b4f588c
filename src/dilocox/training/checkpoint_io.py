"""Checkpoints of one rank: everything that it needs to go on bit for bit.

A checkpoint is a folder `tick-00000120/paris/stage0-shard0/write-1/` with the tensors
(`torch.distributed.checkpoint`), their index `tensors.json`, `state.json`, and, written last,
`files.json` with the sha256 of the others. Without `files.json` it does not exist; its digest is
what the coordinator records. PyTorch writes an index of its own, too, a pickle that is never run:
see `checkpoint_index`.
A tick that is written again (a run that was resumed and stopped at once) gets another folder
beside the first, which stays until the new one is recorded.
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
"""What a write may end with; PyTorch's own is not an `Exception`."""

FORMAT_VERSION = 1
LOOK = 0.2
"""Seconds between two words of a rank that waits for its disk."""

Take = Callable[[Mapping[str, torch.Tensor]], Callable[[], Mapping[str, torch.Tensor]]]
"""Begins to copy tensors as they stand now to host memory; what gives the copies when they are
whole."""


def copied(tensors: Mapping[str, torch.Tensor]) -> Callable[[], Mapping[str, torch.Tensor]]:
    """A `Take` that has copied all when it returns."""
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return lambda: copies


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
    for the first. `whole()` is the tick of the newest checkpoint that all ranks of the run have
    written, none if there is none: it and later ones stay, whatever `keep` says. What fails on
    storage over a network is tried again for `patience` seconds.
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
        """(tick, seconds so far) of the write that is under way; none if there is none."""
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
        """Snapshot now, write in the background.

        `tensors` are copied to host memory as they are now: how, `take` says.
        `on_written(tick, digest)` is called from the writing thread when all is on disk,
        `on_failed(tick, reason)` if not, or if `on_written` raises: a full or broken disk is
        reported and does not end the run.
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
            except (OSError, DilocoxError) as error:
                # What was not deleted goes with a later checkpoint; what is written is whole.
                log.warning("older checkpoints were not deleted: %s", _reason(error))

        self._began = (tick, time.monotonic())
        self._writing = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self, touch: Callable[[], None] = lambda: None) -> None:
        """Wait until the write under way has ended, however long that takes.

        `touch` is called meanwhile, so that the rank keeps counting as alive.
        """
        while self._writing is not None and self._writing.is_alive():
            self._writing.join(LOOK)
            touch()
        self._writing = None

    def _retire(self, tick: int, attempt: str) -> None:
        """Delete what the checkpoint at `tick`, now recorded, makes needless.

        Those of later ticks lie on a course that was left by a resume; they are written anew when
        the run gets there.
        """
        filesystem, root = opened(self._root)
        for other in _attempts(filesystem, rank_folder(root, tick, *self._rank)):
            if other != attempt:
                filesystem.rm(other, recursive=True)
        ticks = [old for old in _ticks(filesystem, root) if old <= tick]
        # Where another rank's disk is full, the last one that can be resumed may be old.
        spared = tick if self._whole is None else (self._whole() or 0)
        # Those that failed leave an empty folder, and must not push out one that is whole.
        whole = [old for old in ticks if exists(self._root, old, *self._rank)]
        spared = min(spared, *whole[-self._keep :])
        for old in [old for old in ticks if old < spared]:
            path = rank_folder(root, old, *self._rank)
            if filesystem.exists(path):
                filesystem.rm(path, recursive=True)
            # The last rank of the last site to leave takes the empty folders along.
            for _ in range(2):
                path = path.rsplit("/", 1)[0]
                try:
                    if filesystem.exists(path) and not filesystem.ls(path):
                        filesystem.rmdir(path)
                except OSError:
                    break  # another rank was faster, or object storage, which has no folders


def _reason(error: BaseException) -> str:
    """One line; the cause where PyTorch has wrapped it (in what is not even an `Exception`)."""
    if isinstance(error, CheckpointException):
        error = next((failure[0] for failure in error.failures.values()), error)
    # A full disk shows first in what wants to finish a file.
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(
        ": "
    )


def _names(filesystem: Any, path: str) -> list[str]:
    """Names in a folder, sorted; none if it is not there."""
    filesystem.invalidate_cache()  # other ranks write beside this one
    if not filesystem.exists(path):
        return []
    listed = filesystem.ls(path, detail=False)
    return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in listed)


def _ticks(filesystem: Any, root: str) -> list[int]:
    parts = [name.removeprefix("tick-") for name in _names(filesystem, root)]
    return sorted(int(part) for part in parts if part.isdecimal())


def _attempts(filesystem: Any, path: str) -> list[str]:
    """Folders of this rank's writes of one tick, oldest first."""
    parts = [name.removeprefix("write-") for name in _names(filesystem, path)]
    return [f"{path}/write-{number}" for number in sorted(int(p) for p in parts if p.isdecimal())]


def _attempt(folder: str, tensors: Mapping[str, torch.Tensor], document: str) -> tuple[str, str]:
    """Write into a new folder below `folder`; its path and the digest of its `files.json`."""
    filesystem, path = opened(folder)
    earlier = _attempts(filesystem, path)
    number = 1 + int(earlier[-1].rsplit("-", 1)[1]) if earlier else 1
    attempt = f"{path}/write-{number}"
    filesystem.makedirs(attempt, exist_ok=True)
    try:
        # In a thread of its own and on a snapshot already: async_save would copy all again.
        index: dict[str, checkpoint_index.Entry] = {}
        writer = checkpoint_writer(
            f"{folder}/write-{number}",
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
        # On a full disk the remains would be in the way of the next checkpoint.
        try:
            filesystem.rm(attempt, recursive=True)
        except Exception as error:  # other people's storage, over a network
            log.warning("%s: could not be deleted: %s", attempt, _reason(error))
        raise
    return attempt, hashlib.sha256(text).hexdigest()


def exists(root: str, tick: int, site: str, stage: int, shard: int) -> bool:
    """True if a whole checkpoint of this rank is there."""
    filesystem, path = opened(rank_folder(root, tick, site, stage, shard))
    return any(
        filesystem.exists(f"{attempt}/files.json") for attempt in _attempts(filesystem, path)
    )


def load(
    root: str, tick: int, site: str, stage: int, shard: int, digest: str, patience: float = 0.0
) -> Loaded:
    """Read one rank's checkpoint after checking it against `digest`.

    What fails on storage over a network is tried again for `patience` seconds. Raises
    `CheckpointError` naming the file if it is missing, changed or of another format, or if the
    storage does not answer.
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
    """Raise `CheckpointError` for a pipe, a device, or a link that leads out of the folder."""
    reason = unsafe_reason(Path(path), Path(attempt)) if is_local(filesystem) else ""
    if reason:
        raise CheckpointError(f"{path}: {reason}; copy the checkpoint again, as plain files")


def _read_tensors(
    filesystem: Any, attempt: str, listed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The tensors by name, from files whose digests were checked. Nothing is unpickled."""
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
    """Folder and list of files of the write whose `files.json` has `digest`."""
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
        f"{whole[-1]}/files.json: not what the run recorded; put it back, or resume from another "
        "checkpoint"
    )


def _sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
