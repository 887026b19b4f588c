"""Rows of token files: what the model reads at once, by the rules of `data.packing`.

- `stream`: row p has the tokens p·L to p·L + L; documents run into each other.
- `documents`: documents are packed whole into rows of L positions, and do not see each other.
- `none`: one document per row.

The last two fill the rest of a row with padding, which counts nothing. A document of n tokens takes
n - 1 positions: its last token is a label alone. Rows are a pure function of token files and rules.
Rows without any counted label are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dilocox.config.data import RowRules
from dilocox.config.preference import PAIR
from dilocox.data.best_fit import best_fit
from dilocox.data.columns import Columns
from dilocox.data.flags import COUNTED, SECOND
from dilocox.data.parts import parts_of
from dilocox.data.token_files import SPLITS, TokenFiles
from dilocox.errors import DataError

NOT_COUNTED = -100
"""Label of a token that does not count, as PyTorch and transformers have it."""

Numbers = npt.NDArray[np.int64]


class RowBatch(NamedTuple):
    """Some rows, with labels that may not count."""

    inputs: Numbers
    """Tokens, int64 [n, L]."""
    labels: Numbers
    """Labels, int64 [n, L]; `NOT_COUNTED` where a token does not count."""
    positions: Numbers | None
    """Position of each token in its document, int64 [n, L]. None: each row is one sequence."""
    columns: Columns | None = None
    """Columns of the labels by name, float32 [n, L]; 0 in padding. None: there are none."""

    def take(self, rows: Numbers | slice) -> RowBatch:
        """Returns some of the rows."""
        positions = None if self.positions is None else self.positions[rows]
        columns = self.columns and {name: each[rows] for name, each in self.columns.items()}
        return RowBatch(self.inputs[rows], self.labels[rows], positions, columns)

    @property
    def counted(self) -> int:
        """Counted labels of these rows; of rows of pairs, the number of pairs."""
        if self.columns and PAIR in self.columns:
            return int(self.columns[PAIR].max(axis=1).sum())
        return int(np.count_nonzero(self.labels >= 0))


@dataclass(frozen=True)
class Filling:
    """How well the rows of a split are filled, and what happened to its documents."""

    rows: int
    filled: float
    """Share of positions that hold a token of a document."""
    labels: int
    """Counted labels of all rows."""
    documents: int
    """Documents of the split."""
    cut: int
    """Documents whose end was cut off."""
    split: int
    """Documents that were split into several pieces."""
    left_out: int
    """Documents without any counted label in a row, or too long and so left out; 0 for a stream."""

    @property
    def line(self) -> str:
        """The values as text for people."""
        parts = [f"{self.rows:,} rows, {100 * self.filled:.1f} % of their positions filled"]
        parts.append(f"{self.labels:,} labels count")
        for count, what in (
            (self.cut, "cut"),
            (self.split, "split"),
            (self.left_out, "left out"),
        ):
            if count:
                parts.append(f"{count:,} of {self.documents:,} documents {what}")
        return "; ".join(parts)


class Rows(Protocol):
    """All rows of a split that an epoch visits."""

    counted: Numbers
    """Counted labels of each row, int64 [rows]; each is 1 or more. Of rows of pairs: pairs."""
    filling: Filling

    def read(self, numbers: Numbers) -> RowBatch:
        """Returns the rows of these numbers."""

    def seen(self, numbers: Numbers, starts: Numbers, ends: Numbers) -> Numbers:
        """Returns how many tokens of each document the rows of these numbers hold, int64.

        `numbers`: ascending. `starts`, `ends`: offsets of all documents of the split.
        """


def plan_rows(files: TokenFiles, split: str, rules: RowRules) -> Rows | None:
    """Returns the rows of a split; None for a stream of tokens that are all labels.

    Plans are kept in memory, since a process asks for the same plan several times. Raises
    `DataError` if no row has a counted label, or if a document is too long and must not be.
    """
    if rules.packing == "stream" and not files.has_flags:
        return None
    key = (files.digest, split, rules)
    if key not in _PLANNED:
        while len(_PLANNED) >= _KEPT:
            _PLANNED.pop(next(iter(_PLANNED)))
        made = StreamRows if rules.packing == "stream" else DocumentRows
        _PLANNED[key] = made(files, split, rules)
    return _PLANNED[key]


def describe_rows(files: TokenFiles, rules: RowRules) -> dict[str, Any] | None:
    """Returns rules and fillings of both splits as JSON; None for a stream of labels alone.

    Raises `DataError` as `plan_rows`.
    """
    found: dict[str, Any] = {"packing": rules.packing, "sequence_length": rules.length}
    for split in SPLITS:
        wholes: Sequence[TokenFiles] = parts_of(files, split) or [files]
        plans = [plan_rows(each, split, rules) for each in wholes]
        fillings = [plan.filling for plan in plans if plan is not None]
        if not fillings:
            return None
        found[split] = dict(vars(_together(fillings)))
    return found


def _together(fillings: Sequence[Filling]) -> Filling:
    """Returns the filling of the rows of several sources."""
    kinds = ("rows", "labels", "documents", "cut", "split", "left_out")
    sums = {kind: sum(getattr(each, kind) for each in fillings) for kind in kinds}
    filled = sum(each.rows * each.filled for each in fillings)
    return Filling(filled=filled / sums["rows"], **sums)


def joined(rows: Sequence[Numbers | RowBatch]) -> Numbers | RowBatch:
    """Returns rows of several reads or sources behind each other. All have one kind."""
    first = rows[0]
    if len(rows) == 1:
        return first
    if not isinstance(first, RowBatch):
        return np.concatenate(rows)  # type: ignore[arg-type]
    *kinds, columns = zip(*rows, strict=True)
    inputs, labels, positions = (
        None if some[0] is None else np.concatenate(some) for some in kinds
    )
    names = columns[0] or ()
    beside = {name: np.concatenate([each[name] for each in columns]) for name in names}
    return RowBatch(inputs, labels, positions, beside or None)  # type: ignore[arg-type]


def rows_line(described: dict[str, Any], split: str) -> str:
    """Returns what `describe_rows` says of a split, as text for people."""
    kind = f"{described['packing']}, {described['sequence_length']:,} positions"
    return f"{kind}: {Filling(**described[split]).line}"


_KEPT = 4
_PLANNED: dict[tuple[str, str, RowRules], Rows] = {}


class StreamRows:
    """Rows of a stream in which some tokens are not counted."""

    def __init__(self, files: TokenFiles, split: str, rules: RowRules) -> None:
        flags = files.flags(split)
        assert flags is not None
        self._tokens, self._flags, self._length = files.tokens(split), flags, rules.length
        self._columns = files.columns(split)
        number = max(0, (len(flags) - 1) // rules.length)
        offsets = np.arange(number, dtype=np.int64) * rules.length
        before = flags.count_before(COUNTED, np.append(offsets, number * rules.length) + 1)
        counted = np.diff(before)
        self._kept = np.flatnonzero(counted)
        self.counted = counted[self._kept]
        _check(files, split, len(self._kept), rules)
        self.filling = Filling(
            rows=len(self._kept),
            filled=1.0,
            labels=int(self.counted.sum()),
            documents=files.document_count(split),
            cut=0,
            split=0,
            left_out=0,
        )

    def read(self, numbers: Numbers) -> RowBatch:
        """See `Rows`."""
        offsets = self._kept[numbers] * self._length
        tokens = self._tokens.gather(offsets, self._length + 1)
        counts = self._flags.gather(offsets, self._length + 1)[:, 1:] & COUNTED
        columns = {
            name: each.gather(offsets, self._length + 1)[:, 1:]
            for name, each in self._columns.items()
        }
        labels = np.where(counts > 0, tokens[:, 1:], NOT_COUNTED)
        return RowBatch(tokens[:, :-1], labels, None, columns or None)

    def seen(self, numbers: Numbers, starts: Numbers, ends: Numbers) -> Numbers:
        """See `Rows`."""
        sequences = self._kept[numbers]
        return covered(sequences, self._length, ends) - covered(sequences, self._length, starts)


class DocumentRows:
    """Rows of whole documents, or pieces of them, with padding behind."""

    def __init__(self, files: TokenFiles, split: str, rules: RowRules) -> None:
        self._tokens, self._flags = files.tokens(split), files.flags(split)
        self._columns = files.columns(split)
        self._length, self._padding = rules.length, files.end_of_text
        self._restart = rules.packing == "documents"
        ends = files.document_ends(split)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
        _refuse_long(files, split, ends - starts - 1, rules)
        document, offset, taken = _pieces(starts, ends, rules)
        counted = self._count(offset, taken)
        keeps = np.flatnonzero(counted)
        document, offset, taken, counted = (a[keeps] for a in (document, offset, taken, counted))
        if not len(keeps) and rules.long_documents == "leave_out":
            _refuse_all_long(files, split, ends - starts - 1, rules)
        _check(files, split, len(keeps), rules)
        rows = best_fit(taken, self._length) if self._restart else np.arange(len(keeps))
        order = np.argsort(rows, kind="stable")
        self._document, self._offset, self._taken = document[order], offset[order], taken[order]
        count = int(rows.max()) + 1
        self._first = np.searchsorted(rows[order], np.arange(count + 1))
        self._pairs = files.has_pairs
        self.counted = (
            np.diff(self._first)
            if self._pairs
            else np.add.reduceat(counted[order], self._first[:-1])
        )
        lengths = ends - starts - 1
        used = np.zeros(len(ends), dtype=bool)
        used[document] = True
        long = used & (lengths > self._length)
        self.filling = Filling(
            rows=count,
            filled=float(taken.sum() / (count * self._length)),
            labels=int(counted.sum()),
            documents=len(ends),
            cut=int(long.sum()) if rules.long_documents == "cut" else 0,
            split=int(long.sum()) if rules.long_documents == "split" else 0,
            left_out=len(ends) - int(used.sum()),
        )

    def read(self, numbers: Numbers) -> RowBatch:
        """See `Rows`."""
        shape = (len(numbers), self._length)
        inputs = np.full(shape, self._padding, dtype=np.int64)
        labels = np.full(shape, NOT_COUNTED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        names = [*self._columns, *([PAIR] if self._pairs else [])]
        columns = {name: np.zeros(shape, dtype=np.float32) for name in names}
        for row, number in enumerate(numbers.tolist()):
            at = 0
            for piece in range(int(self._first[number]), int(self._first[number + 1])):
                offset, taken = self._offset[piece : piece + 1], int(self._taken[piece])
                place = slice(at, at + taken)
                tokens = self._tokens.gather(offset, taken + 1)[0]
                inputs[row, place], labels[row, place] = tokens[:-1], tokens[1:]
                positions[row, place] = np.arange(taken)
                for name, each in self._columns.items():
                    columns[name][row, place] = each.gather(offset, taken + 1)[0, 1:]
                if self._flags is not None:
                    flags = self._flags.gather(offset, taken + 1)[0]
                    labels[row, place][flags[1:] & COUNTED == 0] = NOT_COUNTED
                    if self._pairs:
                        second = int(np.flatnonzero(flags & SECOND)[0])
                        positions[row, at + second : at + taken] = np.arange(taken - second)
                        number_in_row = piece - int(self._first[number]) + 1
                        columns[PAIR][row, place] = number_in_row
                        columns[PAIR][row, at + second - 1 : at + taken] = -number_in_row
                at += taken
            positions[row, at:] = np.arange(self._length - at)
        return RowBatch(inputs, labels, positions if self._restart else None, columns or None)

    def seen(self, numbers: Numbers, starts: Numbers, ends: Numbers) -> Numbers:
        """See `Rows`."""
        found = np.zeros(len(ends), dtype=np.int64)
        for number in numbers.tolist():
            some = slice(int(self._first[number]), int(self._first[number + 1]))
            document, taken = self._document[some], self._taken[some]
            # The last token of a piece is a label alone; of a document's last piece it is read.
            last = self._offset[some] + taken + 1 == ends[document]
            np.add.at(found, document, taken + last)
        return found

    def _count(self, offset: Numbers, taken: Numbers) -> Numbers:
        """Returns the counted labels of pieces: of the tokens behind each one's first token."""
        if self._flags is None:
            return taken.copy()
        # Beginnings and ends of all pieces, in ascending order, so that one pass is enough.
        bounds = np.stack([offset + 1, offset + 1 + taken], axis=1)
        return np.diff(self._flags.count_before(COUNTED, bounds.ravel()).reshape(bounds.shape))[
            :, 0
        ]


def _pieces(starts: Numbers, ends: Numbers, rules: RowRules) -> tuple[Numbers, Numbers, Numbers]:
    """Returns document number, token offset and positions of all pieces, in order: int64 [n] each.

    A piece of t positions has t + 1 tokens. Documents of one token have no piece.
    """
    lengths, room = ends - starts - 1, rules.length
    if rules.long_documents != "split":
        longest = room if rules.long_documents == "leave_out" else int(lengths.max(initial=0))
        whole = np.flatnonzero((lengths > 0) & (lengths <= longest))
        return whole, starts[whole], np.minimum(lengths[whole], room)
    number = -(-lengths // room)
    document = np.repeat(np.arange(len(lengths)), number)
    within = np.arange(len(document)) - np.repeat(np.cumsum(number) - number, number)
    taken = np.minimum(lengths[document] - within * room, room)
    return document, starts[document] + within * room, taken


def _refuse_long(files: TokenFiles, split: str, lengths: Numbers, rules: RowRules) -> None:
    long = int(np.count_nonzero(lengths > rules.length))
    if long and rules.long_documents == "refuse":
        others = '"leave_out"' if files.has_pairs else '"cut" or "split"'
        raise DataError(
            f"data.long_documents: {long:,} of {len(lengths):,} documents of the {split} split of "
            f"{files.folder} are longer than data.sequence_length {rules.length:,} (the longest "
            f"needs {int(lengths.max()):,}): raise data.sequence_length, or set "
            f"data.long_documents to {others}"
        )


def _refuse_all_long(files: TokenFiles, split: str, lengths: Numbers, rules: RowRules) -> None:
    """Raise `DataError` if every document is longer than a row."""
    if len(lengths) and int(lengths.min()) > rules.length:
        raise DataError(
            f"{files.folder}: no row of the {split} split has a label that counts: all "
            f"{len(lengths):,} documents are longer than data.sequence_length {rules.length:,} and "
            f"are left out (the shortest needs {int(lengths.min()):,}); raise data.sequence_length"
        )


def _check(files: TokenFiles, split: str, rows: int, rules: RowRules) -> None:
    if not rows:
        raise DataError(
            f"{files.folder}: no row of the {split} split has a label that counts (data.packing "
            f'"{rules.packing}", data.sequence_length {rules.length}); check which tokens count, '
            "or raise data.sequence_length"
        )


def covered(sequences: Numbers, length: int, before: Numbers) -> Numbers:
    """Returns how many tokens of `sequences` lie below each offset in `before`: int64.

    Args:
        sequences: ascending sequence numbers; sequence p holds the tokens at offsets p·length to
            p·length + length - 1.
        length: tokens per sequence.
        before: token offsets in the split.
    """
    index, inside = np.divmod(before, length)
    below = np.searchsorted(sequences, index)
    within = np.zeros(len(before), dtype=np.int64)
    if len(sequences):
        at = np.minimum(below, len(sequences) - 1)
        within = np.where(sequences[at] == index, inside, 0)
    return below * length + within
