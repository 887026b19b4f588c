"""The batches of one site, read by token range and one inner step ahead of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.round_plan import MemberPlan
from dilocox.data import SequenceSpace, TokenFiles
from dilocox.data.columns import targets
from dilocox.data.rows import RowBatch, joined
from dilocox.inner.counted import CountedLabels
from dilocox.training.site_text import own_token_files
from dilocox.utils.background import BackgroundQueue

Sequences = npt.NDArray[np.int64]
Dataset = Callable[[int, int], Sequences]
"""(start, count) -> int64 [count, sequence_length + 1]; a pure function of its two arguments."""
Read = Callable[[int, int], Sequences | RowBatch]
"""A dataset that may also give rows with labels that do not count."""
Loaded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Inputs, targets and positions of a shard's rows, int64; see `Batch`."""
SHARED = "shared"
"""Space of the token ranges of token files that all sites have."""
Ranges = Sequence[tuple[int, int]]
"""(start, count) of sequence numbers, read one after the other."""


class Batch(NamedTuple):
    """One shard's part of a site's batch."""

    inputs: torch.Tensor
    """int64 [b, L]."""
    labels: torch.Tensor
    """int64 [b, L]; with columns int64 [b, 1 + columns, L], see `dilocox.inner.columns`."""
    counted: CountedLabels | None = None
    """How many labels of the site's batch count, and positions; None: all labels count."""


_NO_ROWS = torch.empty(0, 0, dtype=torch.int64)
NO_BATCH = Batch(_NO_ROWS, _NO_ROWS)
"""Batch of a loop that reads its data by itself."""


class Batches:
    """One shard's part of a site's batches.

    A separate thread calls `read` in the order of training, only for this shard's rows. While one
    step is computed, the thread reads the next step of the round. For a GPU `device` batches are
    in pinned memory, so that copies to the GPU overlap with computation.
    """

    def __init__(
        self,
        read: Read,
        shard: int,
        shards: int,
        device: torch.device | None = None,
        space: SequenceSpace | None = None,
    ) -> None:
        """Prepare to read; `space` is given if labels of its rows may not count."""
        self._read = read
        self._space = space
        self._shard = shard
        self._shards = shards
        self._device = device or torch.device("cpu")
        self._reader = BackgroundQueue()
        self._began = False
        self._ahead: tuple[tuple[tuple[int, int], ...], Future[Loaded | Exception]] | None = None
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
        shards: int | None = None,
    ) -> Batches:
        """Return the batches of one `shard` of `site`.

        Args:
            files: the run's token files. They are used unless the site has token files of its own.
            device: device that trains on the batches. None means the CPU.
            read: the user's own dataset, which replaces all token files.
            shards: number of parts of each batch; None means `site.shards`.
        """
        shards = shards or config.site.shards
        if read is None:
            own = own_token_files(config, site)
            space = SequenceSpace.of(
                config.data, files if own is None else own, seed=config.run.seed
            )
            counts = None if space.all_labels_count else space
            return cls(space.read, shard, shards, device, counts)
        return cls(read, shard, shards, device)

    def step(
        self, ranges: Ranges, batch: int, number: int, members: Sequence[MemberPlan] = ()
    ) -> Batch:
        """Return this shard's rows of one inner step, int64 [batch / shards, L].

        Args:
            ranges: the site's ranges in the whole round.
            batch: sequences per inner step of the site.
            number: inner step of the round, from 0.
            members: parts of all sites whose gradients are averaged in this step. The labels of
                this batch then count as in one batch of all sites.

        Raises:
            ValueError: if `ranges` are too short. Errors of `read` for this step pass through.
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
        if self._space is None:
            return Batch(*loaded[:2])
        own = _labels(self._space, ranges, batch, number)
        divisor = float(own)
        sites = [m for m in members if m.space == SHARED]
        if sites and len(sites) == len(members):
            whole = sum(_labels(self._space, m.ranges, m.batch, number) for m in sites)
            weight = next(m.weight for m in sites if list(m.ranges) == list(ranges))
            divisor = whole * weight / sum(m.weight for m in sites)
        return Batch(*loaded[:2], CountedLabels(own, divisor, loaded[2]))

    def close(self) -> None:
        """Let the thread that reads ahead end."""
        self._reader.close()

    def labels(self, ranges: Ranges, count: int) -> int | None:
        """Return the labels that count in the first `count` sequences of `ranges`.

        None if every token is a label. Raises `ValueError` if `ranges` are too short.
        """
        if self._space is None:
            return None
        return _labels(self._space, ranges, count, 0) if count else 0

    def _parts(self, ranges: Ranges, batch: int, number: int) -> tuple[tuple[int, int], ...]:
        """Return (start, count) of this shard's rows of inner step `number`."""
        share = batch // self._shards
        return tuple(interval(ranges, number * batch + self._shard * share, share))

    def _ask(self, parts: tuple[tuple[int, int], ...]) -> Future[Loaded | Exception]:
        if not self._began:
            self._began = True
            if self._device.type == "cpu":
                # A second team of PyTorch threads in the reader would slow training down. PyTorch
                # sets a thread's team size at the thread's first query, so query before setting.
                torch.get_num_threads()
                self._reader.submit(lambda: torch.set_num_threads(1))
        return self._reader.submit(lambda: self._outcome(parts))

    def _outcome(self, parts: tuple[tuple[int, int], ...]) -> Loaded | Exception:
        """Return the batch, or the error of `read`: only the step that needs it raises it."""
        try:
            return self._load(parts)
        except Exception as error:  # users' code
            return error

    def _load(self, parts: tuple[tuple[int, int], ...]) -> Loaded:
        mine = joined([self._read(start, count) for start, count in parts])
        found: tuple[Sequences, Sequences, Sequences | None]
        if isinstance(mine, RowBatch):
            found = (mine.inputs, targets(mine.labels, mine.columns), mine.positions)
        else:
            found = (mine[:, :-1], mine[:, 1:], None)
        # Copied by numpy, which uses one thread; PyTorch may use several.
        copied = [None if each is None else np.array(each, order="C") for each in found]
        tensors = [None if each is None else torch.from_numpy(each) for each in copied]
        if self._device.type != "cuda":
            return tuple(tensors)  # type: ignore[return-value]
        # A new thread's current GPU is the first one, so the rank's own GPU is selected to pin.
        with torch.cuda.device(self._device):
            return tuple(None if each is None else each.pin_memory() for each in tensors)  # type: ignore[return-value]


def _labels(space: SequenceSpace, ranges: Ranges, batch: int, number: int) -> int:
    """Return the counted labels of inner step `number` of a site's `ranges`."""
    return sum(
        space.counted(start, count) for start, count in interval(ranges, number * batch, batch)
    )


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
