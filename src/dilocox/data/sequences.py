"""Numbered training sequences: a pure function from (token files, seed, number) to tokens.

Training data is an endless space of numbered sequences. A *token range* is an interval of these
numbers. Every `sequences_per_epoch` numbers visit each sequence of the split once. The order is
fixed by the epoch, the seed and the data's digest. So anyone who has the token files can compute
the content of a token range, without reading the ranges before it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from dilocox.config.data import DataSection, LongDocuments, Packing, RowRules
from dilocox.data.rows import RowBatch, plan_rows
from dilocox.data.token_files import SPLITS, TokenFiles
from dilocox.errors import DataError

ROUNDS = 8
"""Feistel rounds. Four rounds give a pseudo-random permutation (Luby and Rackoff 1988). Eight are
used because domains may be small and the mixing function is not a cipher."""

Numbers = npt.NDArray[np.uint64]


def permute(positions: Numbers, size: int, key: bytes) -> Numbers:
    """Apply a pseudo-random permutation of 0..size-1 to `positions`.

    It needs no table of the permutation. A Feistel network permutes the numbers below the next
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
        if self.rows is None:
            return count * self.sequence_length
        return int(self.rows.counted[self.positions(start, count)].sum())

    def read(self, start: int, count: int) -> npt.NDArray[np.int64] | RowBatch:
        """Returns the tokens of the range [start, start + count).

        The result is int64 [count, sequence_length + 1]. Inputs are `[:, :-1]`, labels `[:, 1:]`.
        If there is a plan of rows, the result is a `RowBatch`.
        """
        if self.rows is not None:
            return self.rows.read(self.positions(start, count))
        offsets = self.positions(start, count) * self.sequence_length
        return self._tokens.gather(offsets, self.sequence_length + 1)


def held_out(
    files: TokenFiles, rules: RowRules | int, limit: int
) -> npt.NDArray[np.int64] | RowBatch:
    """Returns up to `limit` validation sequences, evenly spread over the split.

    The result is int64 [n, sequence_length + 1], or a `RowBatch` if there is a plan of rows.
    `rules`: `[data]`'s rules for rows; a number is the length of sequences of a stream. Raises
    `DataError` if the split is too small.
    """
    if isinstance(rules, int):
        rules = RowRules(rules)
    rows, sequence_length = plan_rows(files, "validation", rules), rules.length
    if rows is not None:
        count = min(limit, len(rows.counted))
        return rows.read(np.arange(count, dtype=np.int64) * len(rows.counted) // count)
    available = _sequences(files, "validation", sequence_length)
    count = min(limit, available)
    positions = np.arange(count, dtype=np.int64) * available // count
    return files.tokens("validation").gather(positions * sequence_length, sequence_length + 1)


def check_lengths(files: TokenFiles, rules: RowRules) -> None:
    """Raise `DataError` unless both splits contain at least one sequence, or row, to train on."""
    for split in SPLITS:
        if plan_rows(files, split, rules) is None:
            _sequences(files, split, rules.length)


def _sequences(files: TokenFiles, split: str, sequence_length: int) -> int:
    tokens = files.token_count(split)
    count = (tokens - 1) // sequence_length
    if count < 1:
        own = split == "validation" and "validation_from" in files.content
        raise DataError(_too_small(split, tokens, sequence_length, own))
    return count


def _too_small(split: str, tokens: int, sequence_length: int, own: bool) -> str:
    need = f"sequence_length {sequence_length} needs {sequence_length + 1}"
    mend = "give more text or lower data.sequence_length"
    if split == "validation" and not own:
        mend += " or raise data.validation_fraction"
    key = "data.validation_source" if own else "data.source"
    return f"{key}: the {split} split has {tokens:,} tokens, {need}; {mend}"
