"""The held-out batches of each of several sources, for the held-out loss by source.

The batches of all held-out sequences (`validation_batches`) hold the sources one after another.
Most batches hold one source alone, so their losses are used again. The other sequences of a source,
at its edges, go into batches of their own. So every held-out sequence counts in the loss of its
source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles
from dilocox.data.rows import NOT_COUNTED, RowBatch, joined
from dilocox.data.sequences import held_out_by_source
from dilocox.training.batches import Batch, Sequences
from dilocox.training.builder import Hooks
from dilocox.training.held_out_batches import of_shard, row_count, some_rows, whole_group


@dataclass(frozen=True)
class SourceBatches:
    """Where the held-out sequences of one source are."""

    name: str
    whole: range
    """Numbers of those batches of all held-out sequences that hold this source alone."""
    rest: tuple[Batch, ...]
    """The other sequences of the source: this shard's part."""


def source_batches(
    config: RunConfig, files: TokenFiles, shard: int, hooks: Hooks
) -> list[SourceBatches]:
    """Return the batches of each source.

    The list is empty if only one source has held-out text, or if a function of the user's own
    gives the held-out sequences. It is also empty with a loss of the user's own if all labels
    count, since such a loss may not know labels that do not count.
    """
    streamed = config.data.rows.packing == "stream" and not files.has_flags
    if hooks.validation is not None or ("loss" in hooks.functions and streamed):
        return []
    rules, limit = config.data.rows, config.data.validation_sequences
    rows = held_out_by_source(files, rules, limit)
    if len(rows) < 2:
        return []
    group = whole_group(config)
    batches = sum(map(row_count, rows.values())) // group
    found, first = [], 0
    for name, own in rows.items():
        end = first + row_count(own)
        whole = range(-(-first // group), max(-(-first // group), min(end // group, batches)))
        rest = [own]
        if whole:
            before, after = whole.start * group - first, whole.stop * group - first
            rest = [some_rows(own, slice(0, before)), some_rows(own, slice(after, None))]
        pieces = _batches(config, joined(rest), shard)
        found.append(SourceBatches(name, whole, tuple(pieces)))
        first = end
    return found


def _batches(config: RunConfig, rows: Sequences | RowBatch, shard: int) -> list[Batch]:
    """Return `rows` in batches of whole micro-batches; what fills the last one counts nothing."""
    group, count = whole_group(config), row_count(rows)
    batches = []
    for start in range(0, count, group):
        piece = some_rows(rows, slice(start, start + group))
        if row_count(piece) < group:
            piece = _filled(piece, group)
        batches.append(of_shard(config, piece, shard))
    return batches


def _filled(rows: Sequences | RowBatch, count: int) -> RowBatch:
    """Return `rows`, and copies of the last row that count nothing until there are `count`.

    The copies have no labels, and 0 in all columns.
    """
    if not isinstance(rows, RowBatch):
        rows = RowBatch(rows[:, :-1], rows[:, 1:], None)
    there = len(rows.inputs)
    filled = rows.take(np.minimum(np.arange(count), there - 1))
    filled.labels[there:] = NOT_COUNTED
    for column in (filled.columns or {}).values():
        column[there:] = 0
    return filled
