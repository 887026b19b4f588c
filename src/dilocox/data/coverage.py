"""Finds the documents that given token ranges contain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dilocox.data.rows import Numbers, covered
from dilocox.data.sequences import SequenceSpace
from dilocox.data.token_files import TokenFiles


@dataclass(frozen=True)
class Seen:
    """A document of the training split of which at least one token was read."""

    source: int
    """Number of the document's source in the manifest."""
    file: str
    """Name of the document's file in the manifest; empty for a hub dataset."""
    document: int
    """Number of the document in the training split, from 0."""
    tokens: int
    """Tokens of the document."""
    seen: int
    """Tokens of the document that were read at least once; each position counts once."""


def seen_documents(
    files: TokenFiles, space: SequenceSpace, ranges: Iterable[tuple[int, int]]
) -> list[Seen]:
    """Returns the documents that the token ranges touch, in the order of the training split.

    `ranges` holds pairs (start, count) for [start, start + count). Of each sequence, only the
    `sequence_length` input tokens count as read, not the last label. In rows of whole documents the
    last token of a document counts, too.
    """
    numbers, lengths, read = _read(files, space, list(ranges))
    places = _Places(files)
    return [
        Seen(*places.of(number), number, length, seen)
        for number, length, seen in zip(
            numbers.tolist(), lengths.tolist(), read.tolist(), strict=True
        )
    ]


def _read(
    files: TokenFiles, space: SequenceSpace, ranges: Sequence[tuple[int, int]]
) -> tuple[Numbers, Numbers, Numbers]:
    """Returns numbers, tokens, and tokens read of the documents that `ranges` touch: int64 [n]."""
    if space.mixed is not None:
        own = [space.mixed.ranges(*each) for each in ranges]
        found, first = [], 0
        for source, part in enumerate(space.parts):
            wanted = [each[source] for each in own if each[source][1]]
            numbers, lengths, read = _read(part.files, part, wanted)
            found.append((numbers + first, lengths, read))
            first += part.files.document_count("train")
        numbers, lengths, read = (np.concatenate(column) for column in zip(*found, strict=True))
        return numbers, lengths, read
    parts = [space.positions(start, count) for start, count in ranges]
    sequences = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
    ends = files.document_ends("train")
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    if space.rows is not None:
        read = space.rows.seen(sequences, starts, ends)
    else:
        read = covered(sequences, space.sequence_length, ends) - covered(
            sequences, space.sequence_length, starts
        )
    touched = np.flatnonzero(read)
    return touched, (ends - starts)[touched], read[touched]


class _Places:
    """Maps the number of a training document to (source number, file name)."""

    def __init__(self, files: TokenFiles) -> None:
        # Token files of earlier versions have no "origins".
        self._origins = files.content["splits"]["train"].get("origins") or [[0, 0, 2**62]]
        self._known = "origins" in files.content["splits"]["train"]
        self._ends = np.cumsum([count for _, _, count in self._origins], dtype=np.int64)
        self._sources = files.content["sources"]

    def of(self, document: int) -> tuple[int, str]:
        at = int(np.searchsorted(self._ends, document, side="right"))
        source, file, _ = self._origins[at]
        listed = self._sources[source].get("files")
        return source, str(listed[file]["name"]) if listed and self._known else ""
