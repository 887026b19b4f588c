"""The batches of one site, read by token range and one inner step ahead of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dilocox.config.run_config import RunConfig
from dilocox.data import SequenceSpace, TokenFiles
from dilocox.utils.background import BackgroundQueue

Sequences = npt.NDArray[np.int64]
Dataset = Callable[[int, int], Sequences]
"""(start, count) -> int64 [count, sequence_length + 1]; a pure function of its two arguments."""
Ranges = Sequence[tuple[int, int]]
"""(start, count) of sequence numbers, read one after the other."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels, int64 [b, L] each."""


class Batches:
    """One shard's part of a site's batches.

    A separate thread calls `read` in the order of training, only for this shard's rows. While one
    step is computed, the thread reads the next step of the round. For a GPU `device` batches are
    in pinned memory, so that copies to the GPU overlap with computation.
    """

    def __init__(
        self, read: Dataset, shard: int, shards: int, device: torch.device | None = None
    ) -> None:
        self._read = read
        self._shard = shard
        self._shards = shards
        self._device = device or torch.device("cpu")
        self._reader = BackgroundQueue()
        self._began = False
        self._ahead: tuple[tuple[tuple[int, int], ...], Future[Batch | Exception]] | None = None
        """(start, count) of the next step's rows, and the future batch."""

    @classmethod
    def open(
        cls,
        config: RunConfig,
        site: str,
        shard: int,
        files: TokenFiles,
        device: torch.device | None = None,
        read: Dataset | None = None,
    ) -> Batches:
        """Return the batches of one `shard` of `site`.

        Args:
            files: the run's token files. They are used unless the site has token files of its own.
            device: device that trains on the batches. None means the CPU.
            read: the user's own dataset, which replaces all token files.
        """
        if read is None:
            own = config.sites[site].data
            space = SequenceSpace(
                TokenFiles.open(Path(own).expanduser()) if own else files,
                seed=config.run.seed,
                sequence_length=config.data.sequence_length,
            )
            read = space.read
        return cls(read, shard, config.site.shards, device)

    def step(self, ranges: Ranges, batch: int, number: int) -> Batch:
        """Return inputs and labels, int64 [batch / shards, L] each, of one inner step.

        `ranges`: the site's ranges in the whole round. `batch`: sequences per inner step of the
        site. `number`: inner step of the round, from 0. Raises `ValueError` if `ranges` are too
        short, and any error of `read` for this step.
        """
        parts = self._parts(ranges, batch, number)
        ahead, self._ahead = self._ahead, None
        found = ahead[1] if ahead is not None and ahead[0] == parts else self._ask(parts)
        if sum(count for _, count in ranges) >= (number + 2) * batch:
            later = self._parts(ranges, batch, number + 1)
            self._ahead = (later, self._ask(later))
        loaded = found.result()
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    def _parts(self, ranges: Ranges, batch: int, number: int) -> tuple[tuple[int, int], ...]:
        """Return (start, count) of this shard's rows of inner step `number`."""
        share = batch // self._shards
        return tuple(interval(ranges, number * batch + self._shard * share, share))

    def _ask(self, parts: tuple[tuple[int, int], ...]) -> Future[Batch | Exception]:
        if not self._began:
            self._began = True
            if self._device.type == "cpu":
                # A second team of PyTorch threads in the reader would slow training down. PyTorch
                # sets a thread's team size at the thread's first query, so query before setting.
                torch.get_num_threads()
                self._reader.submit(lambda: torch.set_num_threads(1))
        return self._reader.submit(lambda: self._outcome(parts))

    def _outcome(self, parts: tuple[tuple[int, int], ...]) -> Batch | Exception:
        """Return the batch, or the error of `read`: only the step that needs it raises it."""
        try:
            return self._load(parts)
        except Exception as error:  # users' code
            return error

    def _load(self, parts: tuple[tuple[int, int], ...]) -> Batch:
        rows = [self._read(start, count) for start, count in parts]
        mine = rows[0] if len(rows) == 1 else np.concatenate(rows)
        # Copied by numpy, which uses one thread; PyTorch may use several.
        halves = (np.array(mine[:, :-1], order="C"), np.array(mine[:, 1:], order="C"))
        inputs, labels = (torch.from_numpy(half) for half in halves)
        if self._device.type != "cuda":
            return inputs, labels
        # A new thread's current GPU is the first one, so the rank's own GPU is selected to pin.
        with torch.cuda.device(self._device):
            return inputs.pin_memory(), labels.pin_memory()


def interval(ranges: Ranges, skip: int, count: int) -> list[tuple[int, int]]:
    """Return the part of the concatenated `ranges` that skips `skip` numbers and has `count`.

    Raises `ValueError` if `ranges` are too short.
    """
    parts = []
    for start, length in ranges:
        if skip >= length:
            skip -= length
            continue
        take = min(length - skip, count)
        parts.append((start + skip, take))
        count -= take
        skip = 0
        if count == 0:
            return parts
    raise ValueError("token ranges are shorter than the round needs")
