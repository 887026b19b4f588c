"""Reads the documents of one group of sources, in order and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from dilocox.data.packing import Place
from dilocox.data.record_filter import check_taken
from dilocox.data.source_groups import Group, Named
from dilocox.data.sources import Source

BATCH_CHARACTERS = 4 * 1024 * 1024
"""Characters that are encoded at once. This bounds the memory."""


def placed_batches(group: Group) -> Iterator[tuple[list[str], list[Place]]]:
    """Yield batches of a group's documents, with their origins in the group."""
    named, places = group.named, list[Place]()
    for batch in batches(_noting(places, _placed(named, group.sources, named.own_from))):
        yield batch, places[:]
        places.clear()


def group_texts(named: Named, sources: list[Source]) -> Iterator[str]:
    """Yield the documents of `sources`, the first ones of `named`, all of which are trained on."""
    return (text for _, text in _placed(named, sources))


def _placed(
    named: Named, sources: list[Source], own_from: int | None = None
) -> Iterator[tuple[Place, str]]:
    """Yield (origin, text) of every document of the first `sources` of `named`.

    `data.max_documents` limits the documents of sources that are trained on. The documents of
    sources from `own_from` on, which are held out, come last and are not limited.
    """
    first = len(sources) if own_from is None else own_from
    training = islice(_each(sources[:first], 0, named.names), named.data.max_documents)
    return chain(training, _each(sources[first:], first, named.names))


def _each(sources: list[Source], first: int, names: Sequence[str]) -> Iterator[tuple[Place, str]]:
    """Yield (origin, text) of every document of `sources`, of which `first` is the first's number.

    Raises `DataError` at the end if a filter has taken no record of any source.
    """
    for number, source in enumerate(sources, first):
        for file, text in source.placed():
            yield (number, file), text
    check_taken([source.filter for source in sources], names[first : first + len(sources)])


def _noting(places: list[Place], placed: Iterator[tuple[Place, str]]) -> Iterator[str]:
    """Yield the documents, and append the origin of each to `places`."""
    for place, text in placed:
        places.append(place)
        yield text


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of documents with about `BATCH_CHARACTERS` characters each."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
