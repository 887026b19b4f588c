"""Numbered training sequences: a pure function from (token files, seed, number) to tokens.

Training data is an endless space of numbered sequences. A *token range* is an interval of these
numbers. Every `sequences_per_epoch` numbers visit each sequence of the split once. The order is
fixed by the epoch, the seed and the data's digest. So anyone who has the token files can compute
the content of a token range, without reading the ranges before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dilocox.config.data import DataSection, LongDocuments, Packing, RowRules
from dilocox.data.conversations import LEARNED
from dilocox.data.mixed import MixedSpace, held_out_shares, mixture_of, trained_terms
from dilocox.data.parts import PartFiles, parts_of
from dilocox.data.rows import RowBatch, joined, plan_rows
from dilocox.data.token_files import SPLITS, TokenFiles
from dilocox.errors import DataError

ROUNDS = 8
"""Feistel rounds. Four rounds give a pseudo-random permutation (Luby and Rackoff 1988). Eight are
used because domains may be small and the mixing function is not a cipher."""

Numbers = npt.NDArray[np.uint64]


def permute(positions: Numbers, size: int, key: bytes) -> Numbers:
    """Apply a pseudo-random permutation of 0..size-1 to `positions`.

    No table of the permutation is needed. A Feistel network permutes the numbers below the next
    power of 4. A result outside 0..size-1 is permuted again until it falls inside (cycle-walking,
    Black and Rogaway 2002), less than 4 times on average.

    Args:
        positions: numbers below `size`, uint64.
        size: size of the domain.
        key: key that selects the permutation.

    Returns:
        The permuted numbers: uint64, of the shape of `positions`.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [
        np.uint64(int.from_bytes(hashlib.sha256(key + bytes([i])).digest()[:8], "little"))
        for i in range(ROUNDS)
    ]
    result = _feistel(positions, half, keys)
    outside = np.flatnonzero(result >= size)
    while len(outside):
        result[outside] = _feistel(result[outside], half, keys)
        outside = outside[result[outside] >= size]
    return result


def _feistel(values: Numbers, half: int, keys: list[np.uint64]) -> Numbers:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: Numbers) -> Numbers:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014) to uint64 `values`.

    Every output bit depends on every input bit. Products wrap at 2^64 on purpose.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class SequenceSpace:
    """The numbered sequences of one split of token files.

    With L = `sequence_length`, sequence p has the tokens p·L to p·L + L, both included. The last
    token of a sequence is the first of the next, so that every token but the first is a label once
    per epoch.

    If some tokens are not labels, or documents do not see each other, sequence p is row p of
    `dilocox.data.rows`.

    With several sources, each one has such a space of its own, and numbers are dealt to the sources
    by their weights.
    """

    def __init__(
        self,
        files: TokenFiles,
        *,
        seed: int,
        sequence_length: int,
        split: str = "train",
        packing: Packing = "stream",
        long_documents: LongDocuments = "cut",
    ) -> None:
        self.files = files
        self.seed = seed
        self.sequence_length = sequence_length
        parts = parts_of(files, split)
        self.parts = [
            SequenceSpace(
                part,
                seed=seed,
                sequence_length=sequence_length,
                split=split,
                packing=packing,
                long_documents=long_documents,
            )
            for part in parts
        ]
        """The spaces of several sources; empty if there is one source."""
        self.mixed = MixedSpace(trained_terms(files.content), self.parts) if parts else None
        """How numbers are dealt to `parts`."""
        self.all_labels_count = packing == "stream" and not files.has_flags
        """Whether all labels of all sequences count."""
        if self.mixed is not None:
            self.sequences_per_epoch = self.mixed.sequences_per_epoch
            return
        self._tokens = files.tokens(split)
        self.rows = plan_rows(files, split, RowRules(sequence_length, packing, long_documents))
        """Plan of the rows; None: a stream of tokens that are all labels."""
        kind = "" if packing == "stream" else f"{packing}|{long_documents}|"
        self._identity = (
            f"dilocox/sequences/1|{files.digest}|{split}|{sequence_length}|{seed}|{kind}"
        )
        if self.rows is None:
            self.sequences_per_epoch = _sequences(files, split, sequence_length)
        else:
            self.sequences_per_epoch = len(self.rows.counted)

    @classmethod
    def of(cls, data: DataSection, files: TokenFiles, *, seed: int) -> SequenceSpace:
        """Returns the training sequences of `files` by the rules of the run file's `[data]`."""
        rules = data.rows
        return cls(
            files,
            seed=seed,
            sequence_length=rules.length,
            packing=rules.packing,
            long_documents=rules.long_documents,
        )

    def positions(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Returns the sequence of the split behind each number in [start, start + count).

        The result is int64 [count]. Raises `ValueError` if `start` or `count` is negative.
        """
        if start < 0 or count < 0:
            raise ValueError(f"token range [{start}, {start} + {count}) is not an interval")
        if self.mixed is not None:
            return self.mixed.positions(start, count)
        parts: list[Numbers] = []
        end = start + count
        while start < end:
            epoch, first = divmod(start, self.sequences_per_epoch)
            last = min(self.sequences_per_epoch, first + end - start)
            key = hashlib.sha256(f"{self._identity}{epoch}".encode()).digest()
            inside = np.arange(first, last, dtype=np.uint64)
            parts.append(permute(inside, self.sequences_per_epoch, key))
            start += last - first
        joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
        return joined.astype(np.int64)

    def counted(self, start: int, count: int) -> int:
        """Returns the labels that count in the range [start, start + count)."""
        if self.all_labels_count:
            return count * self.sequence_length
        if self.mixed is not None:
            own = zip(self.parts, self.mixed.ranges(start, count), strict=True)
            return sum(part.counted(*each) for part, each in own)
        assert self.rows is not None
        return int(self.rows.counted[self.positions(start, count)].sum())

    def read(self, start: int, count: int) -> npt.NDArray[np.int64] | RowBatch:
        """Returns the tokens of the range [start, start + count).

        The result is int64 [count, sequence_length + 1]. Inputs are `[:, :-1]`, labels `[:, 1:]`.
        If there is a plan of rows, the result is a `RowBatch`.
        """
        if self.mixed is not None:
            return self.mixed.read(start, count)
        if self.rows is not None:
            return self.rows.read(self.positions(start, count))
        offsets = self.positions(start, count) * self.sequence_length
        return self._tokens.gather(offsets, self.sequence_length + 1)


def held_out(
    files: TokenFiles, rules: RowRules | int, limit: int
) -> npt.NDArray[np.int64] | RowBatch:
    """Returns up to `limit` validation sequences, evenly spread over the split.

    The result is int64 [n, sequence_length + 1], or a `RowBatch` if there is a plan of rows. With
    several sources, each one has its share by weight, and one sequence at least. `rules`:
    `[data]`'s rules for rows; a number is the length of sequences of a stream. Raises `DataError`
    if the split is too small.
    """
    if isinstance(rules, int):
        rules = RowRules(rules)
    own = held_out_by_source(files, rules, limit)
    if own:
        return joined(list(own.values()))
    rows, sequence_length = plan_rows(files, "validation", rules), rules.length
    if rows is not None:
        count = min(limit, len(rows.counted))
        return rows.read(np.arange(count, dtype=np.int64) * len(rows.counted) // count)
    available = _sequences(files, "validation", sequence_length)
    count = min(limit, available)
    positions = np.arange(count, dtype=np.int64) * available // count
    return files.tokens("validation").gather(positions * sequence_length, sequence_length + 1)


def held_out_by_source(
    files: TokenFiles, rules: RowRules, limit: int
) -> dict[str, npt.NDArray[np.int64] | RowBatch]:
    """Returns the sequences of `held_out` by the name of their source, in their order.

    The result is empty for token files of one source.
    """
    parts = parts_of(files, "validation")
    sizes = [_rows_or_sequences(part, "validation", rules) for part in parts]
    if not parts:
        return {}
    limits = held_out_shares(files.content, [part.name for part in parts], sizes, limit)
    return {part.name: held_out(part, rules, n) for part, n in zip(parts, limits, strict=True)}


def check_lengths(files: TokenFiles, rules: RowRules) -> None:
    """Raise `DataError` unless both splits contain at least one sequence, or row, to train on.

    With several sources, each part of a split must contain one. The epochs of each source must be
    one sequence at least.
    """
    for split in SPLITS:
        parts = parts_of(files, split)
        wholes: Sequence[TokenFiles] = parts or [files]
        sizes = [_rows_or_sequences(each, split, rules) for each in wholes]
        if parts and split == "train":
            mixture_of(trained_terms(files.content), sizes)


def _rows_or_sequences(files: TokenFiles, split: str, rules: RowRules) -> int:
    """Returns how many rows or sequences a split has. Raises `DataError` if there is none."""
    rows = None if not files.token_count(split) else plan_rows(files, split, rules)
    return _sequences(files, split, rules.length) if rows is None else len(rows.counted)


def _sequences(files: TokenFiles, split: str, sequence_length: int) -> int:
    tokens = files.token_count(split)
    count = (tokens - 1) // sequence_length
    if count < 1:
        raise DataError(_too_small(files, split, tokens, sequence_length))
    return count


def _too_small(files: TokenFiles, split: str, tokens: int, sequence_length: int) -> str:
    need = f"sequence_length {sequence_length} needs {sequence_length + 1}"
    mend = "give more text or lower data.sequence_length"
    own = split == "validation" and "validation_from" in files.content
    key = "data.validation_source" if own else "data.source"
    if not tokens and "conversations" in files.content:
        need, mend = "and no token of its conversations is learned", LEARNED
    if isinstance(files, PartFiles):
        key = files.key
        if split == "validation":
            mend += ", or set the source's validation_fraction higher, or to 0"
    elif split == "validation" and not own:
        mend += " or raise data.validation_fraction"
    return f"{key}: the {split} split has {tokens:,} tokens, {need}; {mend}"
