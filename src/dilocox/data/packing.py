"""Writes token shards: one document after another, each followed by the end-of-text token.

If the tokenizer has begin-of-text tokens, each document begins with them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

Place = tuple[int, int]
"""Origin of a document: the number of its source, and the number of its file in the source."""

SHARD_BYTES = 256 * 1024 * 1024
"""Size of a token shard in bytes; the last shard of a split may be smaller."""


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Returns little-endian uint16 if it can hold every token id, else little-endian uint32."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


class Packer:
    """Writes one split into numbered shards, and computes their counts and digests."""

    def __init__(
        self,
        folder: Path,
        split: str,
        vocabulary_size: int,
        end_of_text: int,
        shard_bytes: int,
        begin_of_text: tuple[int, ...] = (),
    ) -> None:
        """Prepare to write; the first shard is created by `add`.

        Args:
            folder: folder of the shards.
            split: name of the split, which begins the names of its shards.
            vocabulary_size: largest token id + 1.
            end_of_text: token that follows every document.
            shard_bytes: size of a shard in bytes.
            begin_of_text: tokens that precede every document.
        """
        self.folder = folder
        self.split = split
        self.dtype = token_dtype(vocabulary_size)
        self.per_shard = shard_bytes // self.dtype.itemsize
        self.documents = self.tokens = self.text_bytes = 0
        self.shards: list[dict[str, Any]] = []
        self.origins: list[list[int]] = []
        self._begin_of_text = begin_of_text
        self._end_of_text = end_of_text
        self._stream: IO[bytes] | None = None
        self._room = 0
        self._hash = hashlib.sha256()

    def add(self, documents: Iterable[list[int]], text_bytes: int, places: Iterable[Place]) -> None:
        """Append documents to the split.

        Args:
            documents: token ids of each document.
            text_bytes: UTF-8 size of all these documents together.
            places: origin of each document, in the same order.
        """
        for source, file in places:
            if self.origins and self.origins[-1][:2] == [source, file]:
                self.origins[-1][2] += 1
            else:
                self.origins.append([source, file, 1])
        packed: list[int] = []
        for ids in documents:
            packed.extend(self._begin_of_text)
            packed.extend(ids)
            packed.append(self._end_of_text)
            self.documents += 1
        self.text_bytes += text_bytes
        tokens = np.array(packed, dtype=self.dtype)
        self.tokens += len(tokens)
        while len(tokens):
            if self._room == 0:
                self._next_shard()
            part, tokens = tokens[: self._room], tokens[self._room :]
            self._write(part)

    def close(self) -> None:
        """Finish the last shard and flush it to disk."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None
            self.shards[-1]["sha256"] = self._hash.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entry of this split."""
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.text_bytes,
            "shards": self.shards,
            # (source, file, number of consecutive documents), in the order of the tokens.
            "origins": self.origins,
        }

    def _next_shard(self) -> None:
        self.close()
        name = f"{self.split}-{len(self.shards):05d}.bin"
        self.shards.append({"file": name, "tokens": 0, "sha256": ""})
        self._stream = (self.folder / name).open("xb")
        self._hash = hashlib.sha256()
        self._room = self.per_shard

    def _write(self, part: np.ndarray[Any, Any]) -> None:
        assert self._stream is not None
        raw = part.tobytes()
        self._stream.write(raw)
        self._hash.update(raw)
        self.shards[-1]["tokens"] += len(part)
        self._room -= len(part)
