"""The batches of one site, read by token range, one step ahead of training."""

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
"""(start, count) -> int64 [count, sequence_length + 1]; a pure function of the numbers."""
Ranges = Sequence[tuple[int, int]]
"""(start, count) of sequence numbers, read one after the other."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels, int64 [b, L] each."""


class Batches:
    """One shard's part of a site's batches.

    A thread of its own calls `read`, for the shard's rows alone, in the order of training. While
    one step is computed the thread reads the next step of the round. For a GPU `device` batches lie
    in pinned memory, so that copies to the GPU run beside computation.
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
        """The next step's parts, and what is read of them."""

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
        """Of a `shard` of `site`. `read`: the user's own dataset, instead of the token files of the
        run or of the site."""
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
        """Inputs and labels, int64 [batch / shards, L] each, of inner step `number` of the round.

        `ranges` are those of the whole round. Raises `ValueError` if `ranges` are too short, and
        the error of `read` for this step.
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
        """(start, count) of this shard's rows."""
        share = batch // self._shards
        return tuple(interval(ranges, number * batch + self._shard * share, share))

    def _ask(self, parts: tuple[tuple[int, int], ...]) -> Future[Batch | Exception]:
        if not self._began:
            self._began = True
            if self._device.type == "cpu":
                # A reader with a team of threads of its own would slow the training's team down.
                # PyTorch sets what threads begin with that have not asked: this one asks now.
                torch.get_num_threads()
                self._reader.submit(lambda: torch.set_num_threads(1))
        return self._reader.submit(lambda: self._outcome(parts))

    def _outcome(self, parts: tuple[tuple[int, int], ...]) -> Batch | Exception:
        """The batch, or the error of `read`, which only the step that needs the batch raises."""
        try:
            return self._load(parts)
        except Exception as error:  # users' code
            return error

    def _load(self, parts: tuple[tuple[int, int], ...]) -> Batch:
        rows = [self._read(start, count) for start, count in parts]
        mine = rows[0] if len(rows) == 1 else np.concatenate(rows)
        # numpy's copies: of one thread, which PyTorch's may not be.
        halves = (np.array(mine[:, :-1], order="C"), np.array(mine[:, 1:], order="C"))
        inputs, labels = (torch.from_numpy(half) for half in halves)
        if self._device.type != "cuda":
            return inputs, labels
        # Pinned by this thread, on the rank's own GPU: a thread begins at the first one.
        with torch.cuda.device(self._device):
            return inputs.pin_memory(), labels.pin_memory()


def interval(ranges: Ranges, skip: int, count: int) -> list[tuple[int, int]]:
    """The part of concatenated `ranges` that begins after `skip` numbers, `count` long.

    Raises `ValueError` where they are too short.
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
