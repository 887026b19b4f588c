"""The held-out batches of a rank: for evaluations, and for the gate that judges contributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles, held_out
from dilocox.data.columns import targets
from dilocox.data.rows import RowBatch
from dilocox.errors import ConfigError
from dilocox.inner.counted import CountedLabels
from dilocox.outer.loop import Admission
from dilocox.outer.loss_gate import Gate
from dilocox.training.batches import Batch, Dataset, Sequences

if TYPE_CHECKING:
    from dilocox.training.builder import RankParts


def validation_batches(
    config: RunConfig, files: TokenFiles, shard: int, own: Dataset | None = None
) -> list[Batch]:
    """Return the held-out batches of this shard, each of whole micro-batches.

    A last batch that is not whole is left out. If there are too few sequences for one batch, they
    are repeated. `own` is the user's function for these sequences, instead of the held-out text.
    Raises `ConfigError` if `own` returns an array of another shape.
    """
    group, length = whole_group(config), config.data.sequence_length
    if own is None:
        sequences = held_out(files, config.data.rows, config.data.validation_sequences)
    else:
        sequences = np.asarray(own(0, config.data.validation_sequences))
        if sequences.ndim != 2 or sequences.shape[1] != length + 1 or not len(sequences):
            raise ConfigError(
                f"validation: the function returned an array of shape {sequences.shape}, not "
                f"[sequences, {length + 1}] (data.sequence_length + 1)"
            )
        sequences = sequences.astype(np.int64, copy=False)
    available = row_count(sequences)
    if available < group:
        sequences, available = _repeated(sequences, group), group
    return [
        of_shard(config, some_rows(sequences, slice(start, start + group)), shard)
        for start in range(0, available - group + 1, group)
    ]


def probe_batch(config: RunConfig, files: TokenFiles, shard: int) -> Batch | None:
    """Return the batch, of whole micro-batches, that this shard's gate reads at a boundary.

    None if there is no gate, or if the gate evaluates contributions by itself (see
    `admission_of`).
    """
    section = config.admission
    if not section.gate or config.site.ranks == 1:
        return None
    group = whole_group(config)
    count = -(-section.gate_sequences // group) * group
    sequences = held_out(files, config.data.rows, count)
    # Sequences are only repeated if there is very little held-out text.
    return of_shard(config, _repeated(sequences, count), shard)


def admission_of(config: RunConfig, rank: RankParts, files: TokenFiles | None) -> Admission:
    """Return how this rank judges contributions.

    If one rank holds the whole model, a gate evaluates contributions on a copy of the model in
    fp32. Otherwise the gate judges them by gradients of the held-out loss (see `probe_batch`).
    `files` is None in a run without text, which has no gate.
    """
    section = config.admission
    gate = None
    if section.gate and config.site.ranks == 1 and files is not None:
        batch = of_shard(config, held_out(files, config.data.rows, section.gate_sequences), 0)
        counted, device = batch.counted, rank.mesh.device
        if counted is not None and counted.positions is not None:
            moved = counted.positions.to(device)
            counted = CountedLabels(counted.labels, counted.divisor, moved)
        gate = Gate(
            rank.model.loss_beside(batch.inputs.to(device), batch.labels.to(device), counted)
        )
    return Admission(section.aggregation, section.examines, gate)


def whole_group(config: RunConfig) -> int:
    """Return the sequences of one micro-batch for each stage, and each shard of every replica."""
    return config.site.micro_batch_size * config.site.parts * config.site.stages


def row_count(sequences: Sequences | RowBatch) -> int:
    """Return the number of rows."""
    return len(sequences.inputs if isinstance(sequences, RowBatch) else sequences)


def some_rows(sequences: Sequences | RowBatch, rows: slice) -> Sequences | RowBatch:
    """Return some of the rows."""
    return sequences.take(rows) if isinstance(sequences, RowBatch) else sequences[rows]


def _repeated(sequences: Sequences | RowBatch, count: int) -> Sequences | RowBatch:
    """Return the first `count` rows, or the rows over and over until there are `count`."""
    if isinstance(sequences, RowBatch):
        return sequences.take(np.arange(count) % len(sequences.inputs))
    return np.resize(sequences, (count, sequences.shape[1]))


def of_shard(config: RunConfig, rows: Sequences | RowBatch, shard: int) -> Batch:
    """Return a shard's part of `rows`, which the shard's replicas divide."""
    share = row_count(rows) // config.site.shards
    mine = some_rows(rows, slice(shard * share, (shard + 1) * share))
    if not isinstance(mine, RowBatch):
        return Batch(_tensor(mine[:, :-1]), _tensor(mine[:, 1:]))
    assert isinstance(rows, RowBatch)
    positions = None if mine.positions is None else _tensor(mine.positions)
    counted = CountedLabels(rows.counted, float(rows.counted), positions)
    return Batch(_tensor(mine.inputs), _tensor(targets(mine.labels, mine.columns)), counted)


def _tensor(values: Sequences) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
