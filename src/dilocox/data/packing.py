"""Writes token shards: one document after another, and flags beside them if a format has flags.

Text: each document is followed by the end-of-text token. If the tokenizer has begin-of-text tokens,
each document begins with them. Other formats may leave out both, since a template supplies them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dilocox.data.columns import COLUMN_DTYPE
from dilocox.data.flags import COUNTED, FLAGS_DTYPE, document_flags

Place = tuple[int, int]
"""Origin of a document: the number of its source, and the number of its file in the source."""

Entries = npt.NDArray[Any]
"""Tokens, flags or numbers of a column."""

SHARD_BYTES = 256 * 1024 * 1024
"""Size of a token shard in bytes; the last shard of a split may be smaller."""


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Returns little-endian uint16 if it can hold every token id, else little-endian uint32."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


class ShardFile:
    """One new file of a shard, and the digest of what was written."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb")
        self._hash = hashlib.sha256()

    def write(self, part: Entries) -> None:
        """Append tokens, flags or numbers."""
        raw = part.tobytes()
        self._stream.write(raw)
        self._hash.update(raw)

    def close(self) -> str:
        """Flush the file to disk. Returns its SHA-256 (hex)."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._hash.hexdigest()


def column_file(stem: str, column: str) -> str:
    """Returns the name of a shard's file of a column; `stem`: the shard's name without ending."""
    return f"{stem}.{column}.col"


class Packer:
    """Writes one split into numbered shards, and computes their counts and digests."""

    def __init__(
        self,
        folder: Path,
        split: str,
        vocabulary_size: int,
        end_of_text: int | None,
        shard_bytes: int,
        begin_of_text: tuple[int, ...] = (),
        *,
        flagged: bool = False,
        columns: Sequence[str] = (),
    ) -> None:
        """Prepare to write; the first shard is created by `add`.

        Args:
            folder: folder of the shards.
            split: name of the split, which begins the names of its shards.
            vocabulary_size: largest token id + 1.
            end_of_text: token that follows every document; None: documents bring all their tokens.
            shard_bytes: size of a shard in bytes, without its flags.
            begin_of_text: tokens that precede every document.
            flagged: write the flags of `data.flags` beside the tokens.
            columns: names of the columns (`data.columns`) that are written beside the tokens.
        """
        self.folder = folder
        self.split = split
        self.dtype = token_dtype(vocabulary_size)
        self.per_shard = shard_bytes // self.dtype.itemsize
        self.documents = self.tokens = self.text_bytes = self.counted = 0
        self.flagged = flagged
        self.shards: list[dict[str, Any]] = []
        self.origins: list[list[int]] = []
        self._begin_of_text = list(begin_of_text)
        self._end_of_text = [] if end_of_text is None else [end_of_text]
        self._tokens: ShardFile | None = None
        self._flags: ShardFile | None = None
        self._names = tuple(columns)
        self._columns: list[ShardFile] = []
        self._room = 0

    def add(
        self,
        documents: Iterable[Sequence[int]],
        text_bytes: int,
        places: Iterable[Place],
        counted: Iterable[Sequence[int] | Entries] | None = None,
        columns: Iterable[Sequence[float]] = (),
    ) -> None:
        """Append documents to the split.

        A begin-of-text token does not count as a label, an end-of-text token does.

        Args:
            documents: token ids of each document.
            text_bytes: UTF-8 size of all these documents together.
            places: origin of each document, in the same order.
            counted: per document and token id, whether the token counts as a label, see
                `document_flags`. None: all do. Only with `flagged`.
            columns: per document, the number of each column, which all tokens of it get.

        Raises:
            ValueError: with `flagged`: if a document is empty, or has more or fewer tokens than
                `counted` says.
        """
        for source, file in places:
            if self.origins and self.origins[-1][:2] == [source, file]:
                self.origins[-1][2] += 1
            else:
                self.origins.append([source, file, 1])
        packed: list[int] = []
        flags: list[Entries] = []
        said = iter(counted) if counted is not None else None
        lengths: list[int] = []
        for ids in documents:
            before = len(packed)
            packed.extend(self._begin_of_text)
            packed.extend(ids)
            packed.extend(self._end_of_text)
            lengths.append(len(packed) - before)
            self.documents += 1
            if self.flagged:
                flags.append(self._flags_of(len(ids), next(said) if said is not None else None))
        self.text_bytes += text_bytes
        tokens = np.array(packed, dtype=self.dtype)
        self.tokens += len(tokens)
        beside = np.concatenate(flags) if flags else np.empty(0, dtype=FLAGS_DTYPE)
        self.counted += int(np.count_nonzero(beside & COUNTED))
        numbers = self._numbers(columns, lengths)
        while len(tokens):
            if self._room == 0:
                self._next_shard()
            if self._flags is not None:
                self._flags.write(beside[: self._room])
                beside = beside[self._room :]
            for writer, column in zip(self._columns, numbers, strict=True):
                writer.write(column[: self._room])
            numbers = numbers[:, self._room :]
            part, tokens = tokens[: self._room], tokens[self._room :]
            self._write(part)

    def close(self) -> None:
        """Finish the last shard and flush it to disk."""
        if self._tokens is not None:
            self.shards[-1]["sha256"] = self._tokens.close()
            self._tokens = None
        if self._flags is not None:
            self.shards[-1]["flags"]["sha256"] = self._flags.close()
            self._flags = None
        for name, file in zip(self._names, self._columns, strict=False):
            self.shards[-1]["columns"][name]["sha256"] = file.close()
        self._columns = []

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entry of this split."""
        entry: dict[str, Any] = {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.text_bytes,
            "shards": self.shards,
            # (source, file, number of consecutive documents), in the order of the tokens.
            "origins": self.origins,
        }
        return entry | {"counted": self.counted} if self.flagged else entry

    def _flags_of(self, length: int, counted: Sequence[int] | Entries | None) -> Entries:
        said = np.ones(length) if counted is None else np.asarray(counted)
        if len(said) != length:
            raise ValueError(f"a document of {length} tokens with {len(said)} counted flags")
        before, behind = len(self._begin_of_text), len(self._end_of_text)
        return document_flags(np.concatenate([[False] * before, said, [True] * behind]))

    def _numbers(self, columns: Iterable[Sequence[float]], lengths: Sequence[int]) -> Entries:
        """Returns the numbers of all columns: float32 [columns, tokens]."""
        shape = (len(lengths), len(self._names))
        if not self._names:
            return np.empty((0, sum(lengths)), dtype=COLUMN_DTYPE)
        given = np.array(list(columns), dtype=COLUMN_DTYPE)
        if (len(given) and given.shape != shape) or len(given) != len(lengths):
            raise ValueError(f"numbers of columns of shape {given.shape}, not {shape}")
        return np.repeat(given.reshape(shape), lengths, axis=0).T

    def _next_shard(self) -> None:
        self.close()
        name = f"{self.split}-{len(self.shards):05d}"
        self.shards.append({"file": f"{name}.bin", "tokens": 0, "sha256": ""})
        self._tokens = ShardFile(self.folder / f"{name}.bin")
        if self.flagged:
            self.shards[-1]["flags"] = {"file": f"{name}.flags", "sha256": ""}
            self._flags = ShardFile(self.folder / f"{name}.flags")
        if self._names:
            files = {each: column_file(name, each) for each in self._names}
            self.shards[-1]["columns"] = {k: {"file": f, "sha256": ""} for k, f in files.items()}
            self._columns = [ShardFile(self.folder / file) for file in files.values()]
        self._room = self.per_shard

    def _write(self, part: Entries) -> None:
        assert self._tokens is not None
        self._tokens.write(part)
        self.shards[-1]["tokens"] += len(part)
        self._room -= len(part)
